"""The capacity of experts: what exceeds it is dropped, so that it bounds time and memory of the
busiest rank.
"""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.domain.result import Estimate
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate


def of_mixtral(**training: Any) -> Estimate:
    query = {
        "kind": "training",
        "model": "mixtral-8x7b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 4096, "global_batch_size": 256} | training,
        "parallel": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 4,
            "expert_parallel_size": 8,
        },
    }
    return estimate(query=parse_query(query), with_fixes=False)


@pytest.mark.parametrize(
    ("capacity", "processed"), [(1.0, 1.0), (1.25, 1.25), (1.5, 1.5), (2.0, 1.5)]
)
def test_an_expert_processes_its_load_up_to_its_capacity(capacity: float, processed: float) -> None:
    """An expert 1.5 times as loaded as the mean keeps at most C times the mean (Switch Transformer,
    arXiv 2101.03961 section 2.2), as one would that is loaded so by itself: min(1.5, C).
    """
    bounded = of_mixtral(expert_imbalance=1.5, expert_capacity_factor=capacity)
    same = of_mixtral(expert_imbalance=processed)
    assert bounded.time and bounded.memory and same.time and same.memory
    assert bounded.time.parts_s == pytest.approx(same.time.parts_s)
    assert bounded.memory.activations_bytes == pytest.approx(same.memory.activations_bytes)


def test_dropping_tokens_saves_time_and_memory() -> None:
    bounded, dropless = (
        of_mixtral(expert_imbalance=1.5, expert_capacity_factor=1.25),
        of_mixtral(expert_imbalance=1.5),
    )
    assert bounded.time and bounded.memory and dropless.time and dropless.memory
    assert bounded.time.parts_s["compute"] < dropless.time.parts_s["compute"]
    assert bounded.memory.activations_bytes < dropless.memory.activations_bytes
