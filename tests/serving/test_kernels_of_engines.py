"""Decoding steps of models whose kernels differ by engine, release and die: sparse attention, and
experts in 4 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.catalog import cluster, model
from hp_tool.catalog import gpu as catalogue_gpu
from hp_tool.catalog.efficiency import (
    engine_efficiency,
    expert_efficiency,
    expert_kernels,
    gpu_efficiency,
)
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.experts import experts_seconds
from hp_tool.domain.efficiency import ExpertKernel
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions import schema, serving
from hp_tool.questions.serving.problem import serving_case


def step_s(
    name: str,
    gpu: str,
    engine: str,
    *,
    concurrency: int = 1,
    num_gpus: int = 8,
    t: int = 8,
    **inference: Any,
) -> float:
    """Seconds per output token of one replica with prompts and answers of 1,024 tokens."""
    load = {
        "input_length": 1024,
        "output_length": 1024,
        "concurrency": concurrency,
        "engine": engine,
    }
    query = {
        "kind": "inference",
        "model": name,
        "cluster": {"gpu": gpu, "num_gpus": num_gpus},
        "inference": load | inference,
        "parallel": {"tensor_parallel_size": t},
    }
    found = serving.estimate(query=schema.parse_query(query), with_fixes=False)
    assert found.feasible and found.tpot_s is not None
    return found.tpot_s


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("gpu", ["h200-sxm-141gb", "b200-sxm-180gb"])
def test_sparse_attention_costs_few_kernels_a_layer_at_batch_1(engine: str, gpu: str) -> None:
    """DeepSeek-V3.2 is V3 with an indexer: 14M weights a layer (14 MB in fp8, on each rank) beside
    at least 44 MB of V3's own attention, shared and routed experts on one of eight ranks, and ten
    kernels beside V3's.
    """
    dense, sparse = (
        step_s(name, gpu, engine, precision="fp8") for name in ("deepseek-v3", "deepseek-v3.2")
    )
    assert 1.0 < sparse / dense < 1.35
    kernels_s = (sparse - dense) / 61
    assert 1e-5 < kernels_s < 7e-5, (
        "ten kernels and two or three matmuls of a few microseconds each"
    )


@pytest.mark.parametrize(
    ("concurrency", "milliseconds"), [(4, 17.91), (8, 20.95), (16, 26.39), (32, 35.73), (64, 47.13)]
)  # InferenceMAX's glm5-hopper, from aiconfigurator's silicon_sample.csv at 095f58a51
def test_measured_steps_of_a_sparse_model(concurrency: int, milliseconds: float) -> None:
    found = step_s("glm-5", "h200-sxm-141gb", "sglang", concurrency=concurrency, precision="fp8")
    assert 1e3 * found == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(("concurrency", "t"), [(1, 1), (8, 1), (32, 1), (128, 2), (128, 8)])
def test_newer_dies_serve_four_bit_experts_faster_under_tensorrt_llm(
    concurrency: int, t: int
) -> None:
    """B200 has 2.4 times H100's bandwidth, 2.3 times its arithmetic, and multiplies mxfp4 weights
    in 8 bits.
    """
    hopper, blackwell = (
        step_s(
            "gpt-oss-120b",
            gpu,
            "trtllm",
            concurrency=concurrency,
            num_gpus=t,
            t=t,
            precision="mxfp4",
        )
        for gpu in ("h100-sxm-80gb", "b200-sxm-180gb")
    )
    assert 1.1 < hopper / blackwell < 3.0


def test_half_the_bytes_of_experts_are_no_slower_for_few_tokens() -> None:
    """TensorRT-LLM runs nvfp4 experts of few tokens in low-latency kernels, so they beat fp8's
    twice as many bytes.
    """
    wide, narrow = (
        step_s("deepseek-v3", "b200-sxm-180gb", "trtllm", precision=name)
        for name in ("fp8", "nvfp4")
    )
    assert narrow < 0.95 * wide


# Milliseconds of GPT-OSS-120B's routed experts of one layer on one GPU for 128 tokens, by
# aiconfigurator's collector.
TIMED = [
    ("b200-sxm-180gb", "trtllm", 0.279),
    ("b200-sxm-180gb", "vllm", 0.387),
    ("b200-sxm-180gb", "sglang", 0.293),
    ("h200-sxm-141gb", "trtllm", 0.618),
    ("h200-sxm-141gb", "vllm", 0.664),
]


@pytest.mark.parametrize(("gpu", "engine", "milliseconds"), TIMED)
def test_experts_take_as_long_as_the_engine_s_own_kernel(
    gpu: str, engine: str, milliseconds: float
) -> None:
    constants = engine_efficiency(engine=engine, version=None, silicon=catalogue_gpu(gpu).silicon)
    load = InferenceWorkload(
        input_length=1024,
        output_length=1024,
        precision="mxfp4",
        engine=engine,
        expert_imbalance=1.0,
    )
    machine = cluster(ClusterQuery(gpu=gpu, num_gpus=1))
    case = serving_case(
        model=model("gpt-oss-120b"), cluster=machine, workload=load, engine=constants
    )
    one = ServingCandidates.from_configs([ServingConfig()], concurrency=[128])
    found = float(experts_seconds(case, one, np.array([128.0]))[0])
    # The router and the launches around the experts come to about a tenth; the slowdown in whole
    # engines is fitted apart.
    alone = found / expert_efficiency(engine=engine).grouped_slowdown
    assert 0.9 < 1e3 * alone / milliseconds < 1.25


def test_kernels_are_those_of_the_nearest_timed_release() -> None:
    """Formats that an engine's releases lack come from vLLM."""

    def kernel(overhead_s: float) -> ExpertKernel:
        return ExpertKernel(peak_fraction=0.5, bandwidth_fraction=0.8, overhead_s=overhead_s)

    timed = {
        "trtllm": {
            "1.2": {"bf16": kernel(2.0)},
            "1.10": {"bf16": kernel(10.0), "fp8": kernel(11.0)},
        },
        "vllm": {"0.24.0": {"bf16": kernel(24.0), "int4": kernel(4.0)}},
    }
    die = replace(gpu_efficiency(catalogue_gpu("h100-sxm-80gb")), grouped_matmul=timed)

    def overheads(engine: str, version: str) -> dict[str, float]:
        return {
            name: each.overhead_s
            for name, each in expert_kernels(die, engine=engine, version=version).items()
        }

    assert overheads("trtllm", "1.3") == {"bf16": 2.0, "fp8": 11.0, "int4": 4.0}, (
        "1.3 is before 1.10"
    )
    assert overheads("trtllm", "1.11")["bf16"] == 10.0
    assert overheads("trtllm", "0.17")["bf16"] == 2.0, "older than any: the oldest"
    assert overheads("sglang", "0.5.6") == {"bf16": 24.0, "int4": 4.0}
    assert expert_kernels(replace(die, grouped_matmul=None), engine="vllm", version="0.24.0") == {}
