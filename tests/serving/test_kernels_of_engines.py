"""Decoding steps of models whose kernels differ by engine, release and die: sparse attention, and experts in 4 bits."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool import serving
from hp_tool.queries import schema


def step_s(
    model: str, gpu: str, engine: str, *, concurrency: int = 1, num_gpus: int = 8, t: int = 8, **inference: Any
) -> float:
    """Seconds per output token of one replica with prompts and answers of 1,024 tokens."""
    load = {"input_length": 1024, "output_length": 1024, "concurrency": concurrency, "engine": engine}
    query = {
        "kind": "inference",
        "model": model,
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
    """DeepSeek-V3.2 is V3 with an indexer: 14M weights a layer (14 MB in fp8, on each rank) beside at least 44 MB of V3's own
    attention, shared and routed experts on one of eight ranks, and ten kernels beside V3's.
    """
    dense, sparse = (step_s(name, gpu, engine, precision="fp8") for name in ("deepseek-v3", "deepseek-v3.2"))
    assert 1.0 < sparse / dense < 1.35
    kernels_s = (sparse - dense) / 61
    assert 1e-5 < kernels_s < 7e-5, "ten kernels and two or three matmuls of a few microseconds each"


@pytest.mark.parametrize(
    ("concurrency", "milliseconds"), [(4, 17.91), (8, 20.95), (16, 26.39), (32, 35.73), (64, 47.13)]
)  # InferenceMAX's glm5-hopper, from aiconfigurator's silicon_sample.csv at 095f58a51
def test_measured_steps_of_a_sparse_model(concurrency: int, milliseconds: float) -> None:
    found = step_s("glm-5", "h200-sxm-141gb", "sglang", concurrency=concurrency, precision="fp8")
    assert 1e3 * found == pytest.approx(milliseconds, rel=0.15)
