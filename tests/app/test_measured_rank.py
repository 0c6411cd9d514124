"""Rank 1 prefers layouts whose features measured runs have."""

from __future__ import annotations

from typing import Any

import pytest

import hp_tool
from hp_tool.questions.training.ranking.exact import NEAR_RATIO_MEASURED

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
    "training": {"sequence_length": 4096, "global_batch_size": 64},
}


def layout_features(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.startswith("parallel.")]


def test_a_measured_layout_within_four_percent_is_rank_1_and_names_the_faster_one() -> None:
    first, second = hp_tool.recommend(QUERY, top=2).recommendations
    near, faster = first.estimate.familiarity, first.faster
    assert near is not None and layout_features(near.unmeasured) == []
    assert faster is not None and layout_features(faster.unmeasured) != []
    assert second.parallel == faster.parallel and second.faster is None
    assert first.expected_step_s is not None
    assert faster.expected_step_s < first.expected_step_s
    assert first.expected_step_s <= NEAR_RATIO_MEASURED * faster.expected_step_s
    gain = 1.0 - faster.expected_step_s / first.expected_step_s
    assert faster.gain_fraction == pytest.approx(gain)


def test_without_a_measured_layout_near_the_fastest_rank_1_is_the_fastest() -> None:
    """Every layout that the query allows has the feature."""
    query = QUERY | {"parallel": {"recompute": {"granularity": "selective", "modules": ["mlp"]}}}
    (first,) = hp_tool.recommend(query, top=1).recommendations
    assert first.estimate.familiarity is not None
    assert layout_features(first.estimate.familiarity.unmeasured) == ["parallel.recompute.modules"]
    assert first.faster is None
