"""Fewest devices and Pareto sets, held against trying everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.errors import InputError
from hp_tool.questions import answers, schema, training
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.rank import cost_space
from hp_tool.questions.training.ranking.recommend import device_counts

NUM_GPUS = 48


def query(**changes: Any):
    asked: dict[str, Any] = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": NUM_GPUS, "gpus_per_node": 8},
        "training": {"sequence_length": 4096, "global_batch_size": 96, "total_tokens": 1e11},
    }
    return schema.parse_query(asked | changes)


def best_by_count() -> dict[int, float]:
    """Least expected step time on every number of devices that is whole nodes or an equal share of
    one. Not on 40: five stages hold unequally many layers, which is tried only where somebody has
    40.
    """
    found = {}
    for count in (1, 2, 4, 8, 16, 24, 32, 48):
        per_node = min(count, 8)
        asked = query(
            cluster={"gpu": "h100-sxm-80gb", "num_gpus": count, "gpus_per_node": per_node}
        )
        asked = replace(asked, training=replace(asked.training, offload="none"))
        rows = training.recommend(query=asked, top=5).recommendations
        if rows:  # rank 1 may be a simpler layout than the fastest
            found[count] = min(row.expected_step_s for row in rows)
    return found


def test_the_front_against_devices_is_that_of_every_count():
    truth, best_s = {}, float("inf")
    for count, step_s in best_by_count().items():
        if step_s < best_s:
            truth[count], best_s = step_s, step_s
    front = training.pareto_front(query=query(), against="gpus")
    assert {
        row.estimate.provenance["num_gpus"]: row.expected_step_s for row in front
    } == pytest.approx(truth)
    assert [row.rank for row in front] == list(range(1, len(front) + 1))
    assert len(front) > 2


def test_min_gpus_is_the_first_count_that_meets_the_deadline():
    """24 of 48 devices are not half of a half: every count is tried."""
    front = training.pareto_front(query=query(), against="gpus")
    for row in front[1:]:
        asked = query(objective="min_gpus", constraints={"max_days": row.estimate.days * 1.0001})
        found = training.recommend(query=asked, top=1).recommendations[0]
        assert found.estimate.provenance["num_gpus"] == row.estimate.provenance["num_gpus"]
    impossible = query(objective="min_gpus", constraints={"max_days": front[-1].estimate.days / 50})
    assert training.recommend(query=impossible).recommendations == ()


def test_the_front_against_memory_holds_what_nothing_beats_in_both():
    """Of the usual values; what is left free adds what is fast."""
    plain = {
        "recompute": ["none", "selective", "full"],
        "zero_stage": [0, 1],
        "data_parallel_shard_size": 0,
    }
    fixed = {
        "cuda_graphs": False,
        "cross_entropy": "unfused",
        "overlap": {"expert_parallel": False},
    }
    work = {"sequence_length": 4096, "global_batch_size": 96, **fixed}
    asked = query(parallel=plain | {"context_parallel_communication": "p2p"}, training=work)
    space = cost_space(problem=resolve_training(asked))
    good = np.flatnonzero(space.acceptable)
    points = sorted({(space.step_s[row], space.memory_total_bytes[row]) for row in good})
    truth, least = [], float("inf")
    for step_s, size in points:
        if size < least:
            truth.append((step_s, size))
            least = size
    front = training.pareto_front(query=asked, against="memory")
    np.testing.assert_allclose(
        [(row.estimate.time.step_s, row.estimate.memory.total_bytes) for row in front], truth
    )
    free = training.pareto_front(query=query(), against="memory")
    assert free[0].estimate.time.step_s < front[0].estimate.time.step_s


def test_counts_can_be_filled_and_are_whole_nodes_or_shares_of_one():
    asked = query()
    counts = device_counts(resolve_training(asked))
    assert counts == tuple(sorted(set(counts)))
    assert counts[-1] == NUM_GPUS
    assert {8, 16, 24, 48} <= set(counts)
    assert all(8 % count == 0 if count < 8 else count % 8 == 0 for count in counts)
    assert 40 not in counts  # five divides neither the heads and layers nor the batch


def test_a_front_is_part_of_the_answer_where_it_is_asked_for():
    assert answers.answer_recommend(query(), top=1).pareto is None
    assert answers.answer_recommend(query(), top=1, pareto="memory").pareto
    inference = schema.parse_query(
        {
            "kind": "inference",
            "model": "llama-3-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1},
            "inference": {"input_length": 100, "output_length": 100, "concurrency": 4},
        }
    )
    with pytest.raises(InputError) as caught:
        answers.answer_recommend(inference, top=1, pareto="memory")
    assert caught.value.field == "pareto"


@pytest.mark.parametrize("stated", [{"cross_entropy": "unfused"}, {"cuda_graphs": False}])
def test_a_knob_that_the_query_states_is_not_taken_otherwise(stated):
    work = {"sequence_length": 256, "global_batch_size": 96}
    free, held = (
        training.recommend(query=query(training=work | more), top=1).recommendations[0]
        for more in ({}, stated)
    )
    assert {f"training.{name}" for name in stated} < free.set.keys()
    assert free.set.keys() - {f"training.{name}" for name in stated} == held.set.keys()


def test_nothing_that_the_ranking_holds_beats_the_front_in_both():
    """Both choose among the same strategies: ways to exchange a split sequence among them."""
    asked = query(model="llama-3-70b", training={"sequence_length": 8192, "global_batch_size": 96})
    front = training.pareto_front(query=asked, against="memory")
    ranked = training.recommend(query=asked, top=20).recommendations
    assert any(row.parallel.context_parallel_communication for row in ranked), (
        "one is exchanged otherwise than by default"
    )

    def figures(row):
        return row.estimate.time.step_s, row.estimate.memory.total_bytes

    for row in ranked:
        step_s, size = figures(row)
        assert not [one for one in front if step_s < figures(one)[0] and size < figures(one)[1]]
    assert figures(front[0])[0] <= min(figures(row)[0] for row in ranked)
