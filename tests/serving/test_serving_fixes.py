"""What would fix an infeasible serving configuration: fed back as a query, each fix is what it
says.
"""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.domain.query import Query
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingFix
from hp_tool.questions import schema, serving
from hp_tool.questions.configuration import Configuration
from tests.serving.test_serving_answers import query

RATE = {"concurrency": None, "request_rate_per_second": 15.0}
CASES: dict[str, dict[str, Any]] = {
    "tpot": {"parallel": {"tensor_parallel_size": 1}, "targets": {"tpot_s": 0.01}},
    "ttft": {"parallel": {"tensor_parallel_size": 1}, "targets": {"ttft_s": 0.3}},
    "tail": {
        "parallel": {"tensor_parallel_size": 8},
        "targets": {"tpot_p99_s": 0.013},
        "inference": {"concurrency": 128},
    },
    "illegal": {"parallel": {"tensor_parallel_size": 3}},
    "memory": {"model": "llama-3.1-405b", "parallel": {"tensor_parallel_size": 2}},
    "overload": {"parallel": {"tensor_parallel_size": 1}, "inference": RATE},
    "experts": {
        "model": "qwen3-30b-a3b",
        "parallel": {"tensor_parallel_size": 2, "expert_parallel_size": 4},
    },
}
AXES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "attention_data_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
)


def again(asked: Query, fix: ServingFix) -> InferenceEstimate:
    """The estimate of a mended query."""
    return serving.estimate(
        query=schema.parse_query(Configuration.from_row(fix, query=asked).text())
    )


@pytest.mark.parametrize("case", CASES)
def test_a_mend_is_feasible_and_has_the_figures_it_was_told_with(case: str) -> None:
    asked = query(**CASES[case])
    found = serving.estimate(query=asked)
    assert not found.feasible and 1 <= len(found.fixes) <= 5
    for fix in found.fixes:
        after = again(asked, fix)
        assert after.feasible and not fix.remaining
        assert (after.ttft_s, after.tpot_s, after.request_latency_s) == pytest.approx(
            (fix.ttft_s, fix.tpot_s, fix.request_latency_s), rel=1e-9
        )
        assert after.memory is not None and after.memory.total_bytes == fix.memory_total_bytes
        assert fix.change.startswith("more GPUs") == (fix.num_gpus > 8)


def directions(before: ServingConfig, after: ServingConfig) -> tuple[int, ...]:
    """1 where an axis rises, -1 where it falls."""
    changes = (getattr(after, name) - getattr(before, name) for name in AXES)
    return tuple((change > 0) - (change < 0) for change in changes)


@pytest.mark.parametrize("case", CASES)
def test_no_smaller_change_would_do(case: str) -> None:
    """Mends on the same devices differ on equally many axes; and no two move the same axes the same
    way.
    """
    found = serving.estimate(query=query(**CASES[case]))
    assert found.parallel is not None
    moved = [directions(found.parallel, fix.parallel) for fix in found.fixes if fix.num_gpus == 8]
    assert len(set(moved)) == len(moved) and len({sum(map(abs, one)) for one in moved}) <= 1


def test_the_change_is_told_in_words_and_fields() -> None:
    found = serving.estimate(
        query=query(model="llama-3.1-405b", parallel={"tensor_parallel_size": 2})
    )
    first = found.fixes[0]
    assert first.change == "TP 2 -> 8 (DP 4 -> 1)"  # attention is in 16 bits
    assert (
        first.changed == ("tensor_parallel_size", "data_parallel_size")
        and first.throughput_change_fraction is None
    )


def test_where_nothing_keeps_to_the_targets_the_nearest_is_told_with_what_it_misses() -> None:
    found = serving.estimate(
        query=query(parallel={"tensor_parallel_size": 1}, targets={"tpot_s": 0.0001})
    )
    (nearest,) = found.fixes
    (reason,) = nearest.remaining
    assert reason.code == "target_missed" and reason.needed == nearest.tpot_s < found.tpot_s  # type: ignore[operator]


def test_an_overload_asks_for_devices() -> None:
    found = serving.estimate(query=query(**CASES["overload"]))
    assert found.fixes[-1].num_gpus == 16 and "8 -> 16" in found.fixes[-1].change


def test_fixes_can_be_left_out_and_a_feasible_answer_has_none() -> None:
    late = query(**CASES["tpot"])
    assert serving.estimate(query=late, with_fixes=False).fixes == ()
    assert serving.estimate(query=query(parallel={"tensor_parallel_size": 4})).fixes == ()
