"""The drawn schedule takes what the closed forms say, and a shortened one fills and drains as the
whole does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from hp_tool.domain.result import Estimate
from hp_tool.questions import anatomy
from hp_tool.questions.anatomy import MAX_RANKS
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from hp_tool.questions.training.problem import resolve_training


def drawn(
    *, batch: int, gpus: int = 512, **parallel: Any
) -> tuple[anatomy.Schedule | None, Estimate, float]:
    """(schedule, estimate, the estimate's seconds from the first forward pass to the last backward
    pass).
    """
    query = parse_query(
        {
            "kind": "training",
            "model": "gpt3-175b",
            "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": gpus},
            "training": {"sequence_length": 2048, "global_batch_size": batch},
            "parallel": {
                "tensor_parallel_size": 8,
                "pipeline_parallel_size": 8,
                "recompute": "selective",
            }
            | parallel,
        }
    )
    problem, found = resolve_training(query), estimate(query=query, with_fixes=False)
    assert found.time is not None and found.parallel is not None
    schedule = anatomy.execute_schedule(
        problem=problem,
        config=found.parallel,
        each=anatomy.stage_anatomies(problem=problem, config=found.parallel),
    )
    parts = found.time.parts_s
    names = (
        "compute",
        "attention",
        "recompute",
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
        "overhead",
        "pipeline_bubble",
    )
    return (
        schedule,
        found,
        sum(parts[name] for name in names) - problem.profile.framework.step_overhead_s,
    )


@pytest.mark.parametrize(
    ("batch", "parallel", "tolerance"),
    [
        (80, {}, 0.01),
        (128, {"virtual_pipeline_parallel_size": 2}, 0.02),
        (80, {"pipeline_schedule": "gpipe"}, 0.01),
        (80, {"pipeline_schedule": "zb-h1"}, 0.02),
        (144, {"pipeline_schedule": "zbv"}, 0.03),
        (144, {"pipeline_schedule": "dualpipe"}, 0.03),
    ],
)
def test_a_whole_schedule_takes_as_long_as_the_cost_model_says(
    batch: int, parallel: dict[str, Any], tolerance: float
) -> None:
    schedule, _, seconds = drawn(batch=batch, **parallel)
    assert schedule is not None
    assert schedule.drawn_micro_batches == schedule.num_micro_batches
    assert schedule.end_s == pytest.approx(seconds, rel=tolerance)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_what_is_left_out_lengthens_the_steady_middle_only(name: str) -> None:
    whole, _, _ = drawn(batch=96, pipeline_schedule=name)
    longer, _, _ = drawn(batch=512, pipeline_schedule=name)
    assert whole is not None and longer is not None
    assert (whole.drawn_micro_batches, longer.drawn_micro_batches, longer.num_micro_batches) == (
        12,
        12,
        64,
    )
    assert longer.end_s == pytest.approx(whole.end_s, rel=1e-9)
    assert [row.idle_fraction for row in longer.rows] == pytest.approx(
        [row.idle_fraction for row in whole.rows], rel=1e-9
    )


def test_ranks_run_every_micro_batch_once_and_never_two_things_at_a_time() -> None:
    schedule, _, _ = drawn(batch=128, virtual_pipeline_parallel_size=2)
    assert schedule is not None
    for row in schedule.rows:
        assert all(
            one.end_s <= next_.start_s + 1e-12
            for one, next_ in zip(row.spans, row.spans[1:], strict=False)
        )
        forward = sorted((span.chunk, span.micro_batch) for span in row.spans if span.kind == "F")
        assert forward == [
            (chunk, m) for chunk in range(2) for m in range(schedule.drawn_micro_batches)
        ]
        assert 0.0 < row.idle_fraction < 1.0


def test_a_long_pipeline_is_drawn_by_some_of_its_ranks() -> None:
    schedule, _, _ = drawn(batch=512, gpus=384, pipeline_parallel_size=48)
    assert schedule is not None
    ranks = [row.rank for row in schedule.rows]
    assert len(ranks) == MAX_RANKS and ranks[0] == 0 and ranks[-1] == schedule.num_ranks - 1 == 47
    assert ranks == sorted(set(ranks))


def test_without_a_pipeline_there_is_no_schedule() -> None:
    schedule, _, _ = drawn(batch=512, pipeline_parallel_size=1)
    assert schedule is None


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zbv", "dualpipe"])
def test_the_critical_path_reaches_from_the_start_to_the_end_without_a_gap(name: str) -> None:
    batch = 144 if name in ("zbv", "dualpipe") else 80
    schedule, _, _ = drawn(batch=batch, gpus=256, pipeline_parallel_size=4, pipeline_schedule=name)
    assert schedule is not None
    path = sorted(
        (span.start_s, span.end_s) for row in schedule.rows for span in row.spans if span.critical
    )
    assert path[0][0] == 0.0 and path[-1][1] == schedule.end_s
    shortest_s = min(end - start for start, end in path)
    gaps = [start - end for (_, end), (start, _) in pairwise(path)]
    assert all(-1e-12 <= gap < shortest_s for gap in gaps), (
        "what lies between is the way from rank to rank"
    )
    assert any(not span.critical for row in schedule.rows for span in row.spans)
