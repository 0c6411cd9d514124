"""A question about one machine says what the whole training takes, as one about several does."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.domain.result import Recommendation
from hp_tool.questions import schema
from hp_tool.questions.answers import answer_recommend

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64, "price_per_gpu_hour": 3.0},
    "training": {"sequence_length": 8192, "global_batch_size": 256, "total_tokens": 1e11},
    "parallel": {"pipeline_parallel_size": 1, "context_parallel_size": 1},
}


def first(**changes: Any) -> Recommendation:
    row = answer_recommend(schema.parse_query(QUERY | changes), top=1).recommendations[0]
    assert isinstance(row, Recommendation)
    return row


def test_days_and_dollars_have_intervals_and_a_deadline_a_chance() -> None:
    row = first()
    days, intervals = row.preferred_estimate.calendar_days, row.preferred_estimate.intervals
    assert (
        days is not None
        and intervals is not None
        and row.days_interval is not None
        and row.cost_interval is not None
    )
    assert row.days_interval[0] / days == pytest.approx(
        intervals.step_s[0] / row.preferred_estimate.time.step_s
    )  # type: ignore[union-attr]
    assert row.cost == pytest.approx(days * 24 * 64 * 3.0) and row.cost_interval[1] > row.cost
    assert row.deadline_probability is None
    middle = first(constraints={"max_days": 1.001 * days})
    assert middle.deadline_probability == pytest.approx(0.5, abs=0.03)
    late, early = (
        first(constraints={"max_days": days * factor}).deadline_probability for factor in (1.1, 1.5)
    )
    assert 0.5 < (late or 0.0) < (early or 0.0) <= 1.0


def test_without_a_length_there_is_none() -> None:
    training = {name: value for name, value in QUERY["training"].items() if name != "total_tokens"}
    row = first(training=training)
    assert row.cost is None and row.days_interval is None and row.deadline_probability is None
