"""The latency-throughput front."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.errors import InputError
from hp_tool.questions import schema, serving
from hp_tool.space.pareto import pareto_optimal
from tests.serving.test_serving_answers import query

points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@given(points)
def test_a_point_is_on_the_front_exactly_if_no_other_is_at_least_as_good_in_both_and_better_in_one(
    found: list[tuple[int, int]],
) -> None:
    cost, gain = (
        (np.array(column, dtype=float) for column in zip(*found, strict=True))
        if found
        else (np.empty(0), np.empty(0))
    )
    front = {found[i] for i in pareto_optimal(cost, gain)}
    expected = {
        (c, g)
        for c, g in found
        if not any((a <= c and b >= g) and (a, b) != (c, g) for a, b in found)
    }
    assert front == expected


def test_the_front_trades_speed_for_a_user_against_tokens_of_a_gpu() -> None:
    front = serving.pareto_front(query=query(inference={"concurrency": 256}))
    users = [row.estimate.output_tokens_per_second_per_user for row in front]
    rates = [row.estimate.output_tokens_per_second_per_gpu for row in front]
    assert len(front) > 5
    assert users == sorted(users, reverse=True) and rates == sorted(rates)  # type: ignore[type-var]


def test_the_front_holds_the_best_recommendation_and_agrees_with_the_estimate() -> None:
    asked = query(inference={"concurrency": 256})
    best = serving.recommend(query=asked).recommendations[0]
    front = serving.pareto_front(query=asked)
    assert (
        front[-1].estimate.output_tokens_per_second_per_gpu
        >= best.estimate.output_tokens_per_second_per_gpu
    )  # type: ignore[operator]
    point = front[0]
    load = {"concurrency": int(str(point.estimate.provenance["load"]).split()[1])}
    assert (
        serving.estimate(query=query(inference=load, parallel=schema.to_dict(point.parallel)))
        == point.estimate
    )


def test_targets_cut_the_front_and_a_rate_has_none() -> None:
    cut = serving.pareto_front(
        query=query(inference={"concurrency": 256}, targets={"tpot_s": 0.015})
    )
    assert cut and all(row.estimate.tpot_s <= 0.015 for row in cut)  # type: ignore[operator]
    with pytest.raises(InputError):
        serving.pareto_front(
            query=query(inference={"concurrency": None, "request_rate_per_second": 1.0})
        )
