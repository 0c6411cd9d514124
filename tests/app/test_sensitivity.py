"""What a recommendation depends on, held against rankings asked for one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hp_tool.domain.query import Query
from hp_tool.domain.result import Recommendation
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.errors import InputError
from hp_tool.questions.answers import answer_recommend
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.ranking.exact import NEAR_RATIO_MEASURED
from hp_tool.questions.training.ranking.recommend import recommend
from hp_tool.wording import plots

ASKED = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
    "training": {
        "sequence_length": 4096,
        "global_batch_size": 64,
        "total_tokens": 1e11,
        "cross_entropy": "fused",
        "cuda_graphs": False,
    },
    "parallel": {"micro_batch_size": [1, 2], "context_parallel_size": 1},
}


SHORT = {"sequence_length": 4096, "global_batch_size": 256}
OPEN = {
    "kind": "training",
    "model": "qwen3-14b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
}


@pytest.fixture(scope="module")
def found() -> Sensitivity:
    sensitivity = answer_recommend(parse_query(ASKED), top=1, sensitivity=True).sensitivity
    assert sensitivity is not None
    return sensitivity


def first_s(query: Query) -> float:
    time = recommend(query=query, top=1).recommendations[0].estimate.time
    assert time is not None
    return time.step_s


def test_each_number_of_devices_is_ranked_and_the_cheapest_ones_are_named(
    found: Sensitivity,
) -> None:
    counts = [point.num_gpus for point in found.scaling]
    assert counts == sorted(counts) and counts[-1] == 32 and len(counts) >= 3
    for point in found.scaling:
        asked = parse_query(ASKED).with_num_gpus(point.num_gpus)
        assert point.step_s == pytest.approx(first_s(asked), rel=1e-12)
    cheapest = min(point.gpu_seconds_per_step for point in found.scaling)
    near = [
        point.num_gpus for point in found.scaling if point.gpu_seconds_per_step <= 1.05 * cheapest
    ]
    assert (found.fewest_gpus_near_cheapest, found.fastest_gpus_near_cheapest) == (
        min(near),
        max(near),
    )


def test_an_axis_left_out_costs_what_a_ranking_without_it_says(found: Sensitivity) -> None:
    whole = first_s(parse_query(ASKED))
    fractions = [one.change_fraction for one in found.axes if one.change_fraction is not None]
    assert fractions == sorted(fractions, reverse=True)
    assert min(fractions) >= 1.0 / NEAR_RATIO_MEASURED - 1.0, (
        "rank 1 is at most so far from the fastest"
    )
    changes = {one.change: one for one in found.axes}
    assert (
        "without micro_batch_size" not in changes and "without expert_parallel_size" not in changes
    )
    without = parse_query(ASKED)
    without = replace(without, parallel=replace(without.parallel, zero_stage=0))
    assert changes["without zero_stage"].change_fraction == pytest.approx(
        first_s(without) / whole - 1.0, abs=1e-12
    )


def test_it_starts_from_rank_1_with_the_settings_that_the_ranking_chose() -> None:
    query = parse_query(OPEN)
    answer = answer_recommend(query, top=2, sensitivity=True)
    first, second = answer.recommendations
    sensitivity = answer.sensitivity
    assert sensitivity is not None and sensitivity.start is not None
    assert isinstance(first, Recommendation) and isinstance(second, Recommendation)
    time, faster = first.estimate.time, second.estimate.time
    assert time is not None and faster is not None and faster.step_s < time.step_s
    assert first.set == {"training.cross_entropy": "fused"}
    start = sensitivity.start
    assert (start.parallel, start.step_s) == (first.parallel, time.step_s)
    assert sensitivity.scaling[-1] == start
    unused = {one.change: one for one in sensitivity.axes}["without context_parallel_size"]
    assert first.parallel.context_parallel_size == 1
    assert (unused.step_s, unused.change_fraction) == (time.step_s, 0.0)


def test_where_nothing_fits_there_is_nothing_to_start_from() -> None:
    few = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
    query = parse_query(OPEN | {"model": "llama-3.1-405b", "cluster": few, "training": SHORT})
    answer = answer_recommend(query, top=1, sensitivity=True)
    assert not answer.recommendations and answer.sensitivity is not None
    assert answer.sensitivity.start is None and answer.sensitivity.axes == ()
    assert answer.sensitivity.hardware == () and answer.sensitivity.scaling == ()


def test_better_hardware_is_never_slower(found: Sensitivity) -> None:
    assert {one.change for one in found.hardware} == {"1.5 x memory", "2 x network", "2 x NVLink"}
    assert all(
        one.change_fraction is not None and one.change_fraction <= 1e-9 for one in found.hardware
    )
    assert any(
        one.change_fraction is not None and one.change_fraction < -1e-3 for one in found.hardware
    )


def test_it_is_drawn(found: Sensitivity, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the plot extra is not installed")
    path = tmp_path / "sensitivity.html"
    plots.write_figure(plots.sensitivity_figure(found, title="Llama"), path=path)
    assert "without zero stage" in path.read_text(encoding="utf-8")


def test_serving_has_none() -> None:
    query = {
        "kind": "inference",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1},
        "inference": {"input_length": 100, "output_length": 100, "concurrency": 4},
    }
    with pytest.raises(InputError) as caught:
        answer_recommend(parse_query(query), top=1, sensitivity=True)
    assert caught.value.field == "sensitivity"
