"""A serving configuration as the command of vLLM, SGLang or TensorRT-LLM that starts one replica, in the versions named."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from hp_tool.errors import UnsupportedError
from hp_tool.formats.setup import ServingSetup, headline

VERSIONS = {"vllm": "0.12.0", "sglang": "0.5.6.post2", "trtllm": "1.0"}
QUANTIZATION = {"fp8": "fp8"}
"""Weights narrowed while loading; other narrow checkpoints say themselves what they are."""
MODEL_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Words of --dtype, the same in vLLM and SGLang."""
Options = dict[str, str | None]
"""Value behind each option; None: a switch."""


def vllm(setup: ServingSetup) -> tuple[str, Options]:
    """vllm serve, options as in vllm/engine/arg_utils.py."""
    c, w = setup.parallel, setup.workload
    options: Options = {
        "--tensor-parallel-size": str(c.tensor_parallel_size),
        "--pipeline-parallel-size": str(c.pipeline_parallel_size),
        "--max-num-seqs": str(c.max_num_seqs),
        "--max-num-batched-tokens": str(c.max_num_batched_tokens),
        "--max-model-len": str(w.input_length + w.output_length),
        "--gpu-memory-utilization": f"{setup.memory_fraction:g}",
    }
    if c.attention_data_parallel_size > 1:
        options["--data-parallel-size"] = str(c.attention_data_parallel_size)
    if c.expert_parallel_size > 1:
        ranks = c.tensor_parallel_size * c.attention_data_parallel_size
        if c.expert_parallel_size != ranks:
            raise UnsupportedError(
                f"vllm divides experts over all {ranks} ranks of a stage or over none; "
                f"set expert_parallel_size to {ranks} or 1, or choose sglang",
                field="parallel.expert_parallel_size",
            )
        options["--enable-expert-parallel"] = None
    options |= _number_formats(setup, engine="vllm", cache={"fp8": "fp8"})
    return f"vllm serve {shlex.quote(setup.model_path)}", options


def sglang(setup: ServingSetup) -> tuple[str, Options]:
    """sglang.launch_server, options as in sglang/srt/server_args.py; with attention data parallelism TP counts all ranks, and
    limits are divided by the attention groups.
    """
    c, w = setup.parallel, setup.workload
    options: Options = {
        "--tp-size": str(c.tensor_parallel_size * c.attention_data_parallel_size),
        "--pp-size": str(c.pipeline_parallel_size),
        "--max-running-requests": str(c.max_num_seqs * c.attention_data_parallel_size),
        "--chunked-prefill-size": str(c.max_num_batched_tokens * c.attention_data_parallel_size),
        "--context-length": str(w.input_length + w.output_length),
        "--mem-fraction-static": f"{setup.memory_fraction:g}",
    }
    if c.attention_data_parallel_size > 1:
        options |= {"--enable-dp-attention": None, "--dp-size": str(c.attention_data_parallel_size)}
    if c.expert_parallel_size > 1:
        options["--ep-size"] = str(c.expert_parallel_size)
    options |= _number_formats(setup, engine="sglang", cache={"bf16": "bf16", "fp8": "fp8_e4m3"})
    return f"python -m sglang.launch_server --model-path {shlex.quote(setup.model_path)}", options


def trtllm(setup: ServingSetup) -> tuple[str, Options]:
    """trtllm-serve with the PyTorch backend, options as in tensorrt_llm/commands/serve.py, and in the file that
    --extra_llm_api_options names what has no option there (see `extra_options`). With attention data parallelism every rank of
    its tensor-parallel group attends to requests of its own: groups of several ranks have no word.
    """
    c, w = setup.parallel, setup.workload
    if c.attention_data_parallel_size > 1 and c.tensor_parallel_size > 1:
        raise UnsupportedError(
            "trtllm-serve gives every rank attention of its own, or none; set tensor_parallel_size to 1, or choose sglang",
            field="attention_data_parallel_size",
        )
    options: Options = {
        "--backend": "pytorch",
        "--tp_size": str(c.tensor_parallel_size * c.attention_data_parallel_size),
        "--pp_size": str(c.pipeline_parallel_size),
        "--max_batch_size": str(c.max_num_seqs),
        "--max_num_tokens": str(c.max_num_batched_tokens),
        "--max_seq_len": str(w.input_length + w.output_length),
    }
    if c.expert_parallel_size > 1:
        options["--ep_size"] = str(c.expert_parallel_size)
    return f"trtllm-serve {shlex.quote(setup.model_path)}", options


def extra_options(setup: ServingSetup) -> dict[str, object]:
    """TensorRT-LLM's LlmArgs for its options file; empty where there is nothing to say."""
    options: dict[str, object] = {}
    if setup.parallel.attention_data_parallel_size > 1:
        options["enable_attention_dp"] = True
    if setup.workload.kv_cache_precision == "fp8":
        options["kv_cache_config"] = {"dtype": "fp8"}
    return options


ENGINES: dict[str, Callable[[ServingSetup], tuple[str, Options]]] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def command(setup: ServingSetup, *, engine: str) -> str:
    """A shell script that starts one replica. Raises UnsupportedError for what the engine's command cannot say."""
    for name in ("speculative", "disaggregated"):
        if getattr(setup.workload, name) is not None:
            raise UnsupportedError(
                f"the command of one replica does not say inference.{name}: draft models and routers are set up by hand; leave "
                "it out of the query that is exported",
                field=f"inference.{name}",
            )
    start, options = ENGINES[engine](setup)
    extra = extra_options(setup) if engine == "trtllm" else {}
    file: tuple[str, ...] = ()
    if extra:
        options["--extra_llm_api_options"] = "$extra"
        file = ('extra="$(mktemp --suffix=.yaml)"', "cat > \"$extra\" <<'END'", json.dumps(extra), "END")
    c = setup.parallel
    ranks = c.tensor_parallel_size * c.pipeline_parallel_size * c.attention_data_parallel_size
    quoted = {name: f'"{value}"' if value == "$extra" else shlex.quote(value or "") for name, value in options.items()}
    lines = [name if value is None else f"{name} {quoted[name]}" for name, value in options.items()]
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"# {engine} {VERSIONS[engine]}: {headline(setup)}; one of {setup.cluster.num_gpus // ranks} replicas.",
            *file,
            " \\\n    ".join((start, *lines, '"$@"')),
            "",
        )
    )


def _number_formats(setup: ServingSetup, *, engine: str, cache: dict[str, str]) -> Options:
    """Weights, activations and cache as the estimate took them. `auto`, a cache in the model's own type, is vLLM's only word
    for 16 and 32 bits: `bfloat16` is for models that cache in fp8 by themselves (vllm/config/cache.py).
    """
    weights, kept = setup.workload.precision, setup.workload.kv_cache_precision or "bf16"
    options: Options = {"--dtype": MODEL_TYPES.get(weights, "bfloat16")}
    if weights in QUANTIZATION:
        options["--quantization"] = QUANTIZATION[weights]
    word = cache.get(kept) or ("auto" if options["--dtype"] == MODEL_TYPES.get(kept) else None)
    if word is None:
        raise UnsupportedError(
            f"{engine} {VERSIONS[engine]} has no word for a cache in {kept} beside weights in {weights}; "
            f"set inference.kv_cache_precision to {' or '.join(dict.fromkeys(('bf16', *cache)))}",
            field="inference.kv_cache_precision",
        )
    return options | {"--kv-cache-dtype": word}
