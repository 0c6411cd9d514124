"""Measure inference with vLLM's own benchmark, `vllm bench latency`.

The benchmark reports the latency T(n) of a batch with n output tokens. T(1) is the time to first
token, so two runs give both latencies: TPOT = (T(n) - T(1)) / (n - 1).
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from hp_tool.domain.measurement import Hardware, Measurement, ServingTimes
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.requests import InferenceRequest
from hp_tool.errors import UnsupportedError

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)


def serve(request: InferenceRequest) -> Measurement:
    """Run the benchmark. Raise UnsupportedError if vLLM is not installed."""
    program = shutil.which("vllm")
    if program is None:
        raise UnsupportedError(
            "Runner vllm needs the command `vllm`, which is not on this node's PATH. Install vLLM "
            "there."
        )
    started = time.monotonic()
    folder = Path.cwd() / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(huggingface_config(request)))
    lengths = sorted({1, request.inference.output_length})
    seconds = [_seconds(program, request, model=folder, output_length=length) for length in lengths]
    return Measurement(
        status="ok",
        serving=serving_times(request, first=seconds[0], whole=seconds[-1]),
        hardware=_hardware(request),
        versions={"python": platform.python_version(), "vllm": metadata.version("vllm")},
        wall_s=time.monotonic() - started,
    )


def benchmark_command(
    program: str, request: InferenceRequest, *, model: Path, output_length: int, result: Path
) -> list[str]:
    """Return the benchmark command, with random weights and token ids."""
    load, parallel = request.inference, request.parallel
    return [
        *(
            program,
            "bench",
            "latency",
            f"--model={model}",
            "--load-format=dummy",
            "--skip-tokenizer-init",
        ),
        *(
            "--disable-detokenize",
            f"--dtype={_DTYPES[str(load.precision)]}",
            f"--seed={request.seed}",
        ),
        f"--max-model-len={load.max_model_len or load.input_length + load.output_length}",
        f"--input-len={load.input_length}",
        f"--output-len={output_length}",
        f"--batch-size={load.concurrency}",
        f"--tensor-parallel-size={parallel.tensor_parallel_size}",
        f"--max-num-seqs={parallel.max_num_seqs}",
        f"--max-num-batched-tokens={parallel.max_num_batched_tokens}",
        f"--num-iters-warmup={request.warmup}",
        f"--num-iters={request.repetitions}",
        f"--output-json={result}",
    ]


def serving_times(
    request: InferenceRequest, *, first: list[float], whole: list[float]
) -> ServingTimes:
    """Compute TTFT and TPOT from the latencies with one output token and with all output tokens."""
    steps = request.inference.output_length - 1
    ttft = statistics.median(first)
    tpot = [(seconds - ttft) / steps for seconds in whole] if steps else [0.0]
    tokens = (request.inference.concurrency or 1) * request.inference.output_length
    rate = tokens / statistics.median(whole)
    return ServingTimes.from_repetitions(
        ttft_s=first, tpot_s=tpot, output_tokens_per_second=rate, runner="vllm"
    )


def huggingface_config(request: InferenceRequest) -> dict[str, Any]:
    """Return a Hugging Face config.json with the shape of the request's model."""
    model = request.model
    length = request.inference.input_length + request.inference.output_length
    return {
        **_family(model),
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "max_position_embeddings": max(length, model.max_position_embeddings or 0),
        "tie_word_embeddings": model.tie_word_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": _DTYPES[str(request.inference.precision)],
    }


def _family(model: ModelSpec) -> dict[str, Any]:
    if model.query_key_norm == "head":
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _seconds(
    program: str, request: InferenceRequest, *, model: Path, output_length: int
) -> list[float]:
    result = Path.cwd() / f"vllm-{output_length}.json"
    environment = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    argv = benchmark_command(
        program, request, model=model, output_length=output_length, result=result
    )
    subprocess.run(argv, env=environment, check=True, timeout=request.timeout_s)
    return read_latencies(result.read_text())


def read_latencies(text: str) -> list[float]:
    """Return the `latencies` in vLLM's output file."""
    return [float(seconds) for seconds in json.loads(text)["latencies"]]


def _hardware(request: InferenceRequest) -> Hardware:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return Hardware(
        gpu=request.gpu, device_name=name, num_gpus=request.num_gpus, hosts=(platform.node(),)
    )
