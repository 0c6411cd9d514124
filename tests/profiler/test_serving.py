"""Inference runs: the KV cache changes no token, tensor parallelism changes no token, and the times
add up.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_tool.cluster.launchers import create, jobs, torchrun
from hp_tool.cluster.profiler.support import check_serving
from hp_tool.domain.inference import InferenceWorkload, LoadSpec
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.states import JobState
from hp_tool.errors import InputError, UnsupportedError
from tests.conftest import skip_or_fail
from tests.launchers.contract import wait
from tests.profiler.requests import GPT, LATENT, LLAMA, MOE

QWEN = {**LLAMA, "query_key_norm": "head"}


def inference_request(
    *,
    model: dict[str, Any] | None = None,
    inference: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **changes: Any,
) -> InferenceRequest:
    """Three prompts of eight tokens, six tokens each, on CPU processes."""
    config = ServingConfig(**(parallel or {}))
    load = {
        "input_length": 8,
        "output_length": 6,
        "concurrency": 3,
        "precision": "fp32",
        **(inference or {}),
    }
    return InferenceRequest(
        **{
            "run_id": "test",
            "model": ModelSpec(**{**GPT, **(model or {})}),
            "inference": InferenceWorkload(**load),
            "parallel": config,
            "num_gpus": config.tensor_parallel_size,
            "gpu": "cpu",
            "repetitions": 3,
            "timeout_s": 1200.0,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size: 2"),
        ({"parallel": {"attention_data_parallel_size": 2}}, "attention_data_parallel_size: 2"),
        ({"parallel": {"max_num_seqs": 2}}, "a concurrency above max_num_seqs 2"),
        ({"inference": {"precision": "fp8"}}, "precision: fp8"),
        ({"inference": {"kv_cache_precision": "fp8"}}, "kv_cache_precision"),
        ({"inference": {"concurrency": None}}, "a load without one concurrency"),
        ({"inference": {"prefix_cache_hit_rate": 0.5}}, "prefix_cache_hit_rate: 0.5"),
        ({"inference": {"load": LoadSpec(arrival="poisson")}}, "arrival: poisson"),
        ({"model": LATENT}, "model.kv_lora_rank: 32"),
        (
            {"model": {"num_attention_heads": 1}, "parallel": {"tensor_parallel_size": 2}},
            "num_attention_heads 1",
        ),
    ],
)
def test_what_it_does_not_serve(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        check_serving(inference_request(**changes))


def test_a_replica_is_one_tensor_parallel_group() -> None:
    with pytest.raises(InputError, match="num_gpus is 2, but must equal tensor_parallel_size 1"):
        check_serving(inference_request(num_gpus=2))


def test_vllm_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_tool.cluster.profiler import vllm_bench

    monkeypatch.setattr(vllm_bench.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="needs the command `vllm`"):
        vllm_bench.serve(inference_request(model={**LLAMA, "vocab_size": 32000}, runner="vllm"))


def test_vllm_is_asked_for_the_request() -> None:
    from hp_tool.cluster.profiler import vllm_bench

    asked = inference_request(
        model={**QWEN, "vocab_size": 32000}, runner="vllm", parallel={"tensor_parallel_size": 2}
    )
    assert asked.num_processes == 1
    argv = vllm_bench.benchmark_command(
        "vllm", asked, model=Path("/m"), output_length=6, result=Path("/r")
    )
    assert argv[:4] == ["vllm", "bench", "latency", "--model=/m"]
    assert {
        "--input-len=8",
        "--output-len=6",
        "--batch-size=3",
        "--tensor-parallel-size=2",
        "--dtype=float32",
    } <= set(argv)
    bounded = dataclasses.replace(
        asked, inference=dataclasses.replace(asked.inference, max_model_len=512)
    )
    argv = vllm_bench.benchmark_command(
        "vllm", bounded, model=Path("/m"), output_length=6, result=Path("/r")
    )
    assert "--max-model-len=512" in argv
    check_serving(bounded)
    config = vllm_bench.huggingface_config(asked)
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedError, match="models other than Llama"):
        check_serving(inference_request(runner="vllm"))


def test_vllms_two_benchmarks_give_both_latencies() -> None:
    from hp_tool.cluster.profiler import vllm_bench

    first = vllm_bench.read_latencies(
        '{"avg_latency": 0.2, "latencies": [0.1, 0.2, 0.3], "percentiles": {"50": 0.2}}'
    )
    times = vllm_bench.serving_times(
        inference_request(runner="vllm"), first=first, whole=[1.2, 1.2, 1.7]
    )
    assert (times.ttft_s, times.tpot_s) == pytest.approx((0.2, 0.2))
    assert times.output_tokens_per_second == pytest.approx(18 / 1.2)


SINGLE: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"model": LLAMA},
    "qwen": {"model": QWEN},
    "moe": {"model": MOE},
}
DOUBLE = {
    f"{name}-tp2": {**changes, "parallel": {"tensor_parallel_size": 2}}
    for name, changes in SINGLE.items()
}


@pytest.mark.components
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_cache_gives_the_tokens_of_a_full_pass(tmp_path: Path, processes: int) -> None:
    """`answers.py` serves each request, and again without a cache: every token the whole sequence
    through the model.
    """
    _needs_megatron()
    cases = SINGLE if processes == 1 else DOUBLE
    files = {
        f"{name}.request.json": jobs.request_json().dump_json(inference_request(**changes)).decode()
        for name, changes in cases.items()
    }
    script = Path(__file__).with_name("answers.py")
    launcher = create("local", root=tmp_path, cpu_only=True)
    request = inference_request(num_gpus=processes)
    plan = torchrun.job_plan(request, job_name="answers")
    command = (*plan.command[: plan.command.index("-m", 3)], str(script), ".")
    environment = {**plan.environment, "PYTHONPATH": str(script.parents[2])}
    plan = replace(
        plan,
        command=command,
        environment=environment,
        files={**plan.files, **files},
        timeout_s=1200.0,
    )
    wait(launcher, launcher.submit(plan), until={JobState.FINISHED})
    log = (tmp_path / "answers" / "job.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("same tokens")] == [
        f"same tokens: {n}" for n in sorted(cases)
    ]


@pytest.mark.components
def test_an_inference_run_through_the_launcher(tmp_path: Path) -> None:
    _needs_megatron()
    launcher = create("local", root=tmp_path, cpu_only=True)
    asked = inference_request(
        model=LLAMA, parallel={"tensor_parallel_size": 2, "max_num_batched_tokens": 16}
    )
    handle = launcher.submit(launcher.plan(asked, job_name="serve"))
    wait(launcher, handle, until={JobState.FINISHED})
    found = launcher.fetch(handle)
    assert found.status == "ok", found.log_tail
    _check(found)


def _check(found: Measurement) -> None:
    times = found.serving
    assert times is not None and found.step_s is None and times.runner == "megatron-core"
    assert len(times.ttft_times_s) == len(times.tpot_times_s) == 3
    assert min(times.tpot_times_s) <= times.tpot_s <= max(times.tpot_times_s)
    assert 0 < times.tpot_s < times.ttft_s + 1
    # Nobody waits for less than the mean prompt does, and the tokens of the others come one step at
    # a time.
    assert (
        times.output_tokens_per_second
        <= 18 / (min(times.ttft_times_s) + 5 * min(times.tpot_times_s)) * 1.001
    )
    assert len(found.peak_memory_bytes_per_rank) == 2 and min(found.peak_memory_bytes_per_rank) > 0
    assert found.hardware is not None and found.hardware.num_gpus == 2


def _needs_megatron() -> None:
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
