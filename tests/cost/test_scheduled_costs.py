"""What a schedule does to whole predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.network import dense_group
from hp_tool.cost.schedules.bubble import with_mirrored_stage
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Estimate
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training import config_query, estimate, recommend
from hp_tool.questions.training.problem import resolve_training

SCHEDULES = ("1f1b", "interleaved", "gpipe", "zb-h1", "zbv", "dualpipe", "dualpipe-v")
BASE: dict[str, Any] = {
    "kind": "training",
    "model": "gpt3-175b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 512},
    "training": {"sequence_length": 2048, "global_batch_size": 256},
    "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8, "recompute": "selective"},
}


def query(**parallel: Any) -> Any:
    return parse_query(BASE | {"parallel": BASE["parallel"] | parallel})


def asked(schedule: str, **parallel: Any) -> Estimate:
    chunks = {"interleaved": 2}.get(schedule)
    more = {"virtual_pipeline_parallel_size": chunks} if chunks else {}
    return estimate(query=query(pipeline_schedule=schedule, **more, **parallel), with_fixes=False)


@pytest.fixture(scope="module")
def found() -> dict[str, Estimate]:
    return {name: asked(name) for name in SCHEDULES}


@pytest.mark.parametrize("name", SCHEDULES)
def test_parts_sum_and_the_answer_is_valid_input(name: str, found: dict[str, Estimate]) -> None:
    one = found[name]
    assert one.time is not None and one.memory is not None and one.parallel is not None
    assert sum(one.time.parts_s.values()) == pytest.approx(one.time.step_s)
    again = estimate(query=query(**to_dict(config_query(one.parallel))), with_fixes=False)
    assert again == one


def test_schedules_differ_in_what_they_are_made_for(found: dict[str, Estimate]) -> None:
    bubble = {name: one.time.parts_s["pipeline_bubble"] for name, one in found.items() if one.time}
    assert bubble["zbv"] < bubble["zb-h1"] < bubble["1f1b"] == bubble["gpipe"]
    assert bubble["dualpipe"] < bubble["1f1b"] and bubble["interleaved"] < bubble["1f1b"]
    memory = {name: one.memory for name, one in found.items() if one.memory}
    held = {name: each.layer_activations_bytes for name, each in memory.items()}
    assert held["zb-h1"] == held["1f1b"] == held["zbv"]
    assert held["gpipe"] == held["1f1b"] * 32 / 8  # m for p
    assert held["dualpipe"] == pytest.approx(held["1f1b"] * 9 / 8)
    assert memory["dualpipe"].weights_bytes == pytest.approx(
        2 * memory["1f1b"].weights_bytes, rel=0.05
    )
    # Sharded over twice as many ranks.
    assert memory["dualpipe"].optimizer_bytes == pytest.approx(
        memory["1f1b"].optimizer_bytes, rel=0.05
    )
    for name in SCHEDULES:
        assert found[name].time.parts_s["compute"] > 0  # type: ignore[union-attr]


def test_zbv_has_both_ends_on_its_first_rank() -> None:
    """Embedding and output layer together, so that the other ranks, which have neither, wait for
    the first.
    """
    v, plain = asked("zbv"), asked("interleaved")
    assert (
        v.memory is not None
        and plain.memory is not None
        and v.time is not None
        and plain.time is not None
    )
    final_norm = 2 * 2 * 12288
    assert v.memory.worst_stage == 0 and v.memory.logits_bytes > 0
    assert (
        v.memory.weights_bytes - plain.memory.weights_bytes == final_norm
    )  # the tied matrix is there once
    assert (
        v.time.parts_s["data_parallel"] < plain.time.parts_s["data_parallel"]
    )  # and needs no reduction between ranks
    assert v.time.parts_s["compute"] > plain.time.parts_s["compute"]


def test_split_backward_passes_gain_little_memory_from_full_recomputation() -> None:
    """Weight gradients want the activations again after the input gradients."""
    saved = {}
    for name in ("1f1b", "zb-h1"):
        selective, full = asked(name), asked(name, recompute="full")
        assert selective.memory is not None and full.memory is not None
        saved[name] = selective.memory.total_bytes - full.memory.total_bytes
    assert saved["zb-h1"] < saved["1f1b"]


def test_a_list_of_schedules_is_searched_and_each_runs_its_chunks() -> None:
    result = recommend(query=query(pipeline_schedule=list(SCHEDULES)), top=100)
    names = {row.parallel.pipeline_schedule for row in result.recommendations}
    assert names == {None, "gpipe", "zb-h1", "zbv", "dualpipe", "dualpipe-v"}
    for row in result.recommendations:
        schedule = row.parallel.pipeline_schedule
        chunks = 2 if schedule in ("zbv", "dualpipe-v") else 1
        assert row.parallel.virtual_pipeline_parallel_size == chunks or schedule is None
    only = recommend(query=query(pipeline_schedule=["1f1b", "zbv"]), top=100)
    assert {
        (r.parallel.pipeline_schedule, r.parallel.virtual_pipeline_parallel_size)
        for r in only.recommendations
    } == {(None, 1), ("zbv", 2)}


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe_keeps_each_stage_at_both_ends_of_the_pipeline(p: int) -> None:
    """Stages r and p - 1 - r hold the same parameters; the farthest two are p - 1 stages of 8 ranks
    apart.
    """
    problem = resolve_training(query())
    c = Candidates.from_configs(
        [
            ParallelConfig(
                tensor_parallel_size=4,
                pipeline_parallel_size=p,
                data_parallel_size=2,
                pipeline_schedule="dualpipe",
            )
        ]
    )
    replicas = dense_group(c, "dp", cluster=problem.cluster)
    pair, *others = with_mirrored_stage(c, replicas, cluster=problem.cluster).axes
    assert (int(pair.size[0]), int(pair.stride[0])) == (2, 8 * (p - 1))
    assert tuple(others) == replicas.axes


def test_one_and_many_agree() -> None:
    problem = resolve_training(query())
    configs = [
        ParallelConfig(
            tensor_parallel_size=8,
            pipeline_parallel_size=8,
            data_parallel_size=8,
            sequence_parallel=True,
            virtual_pipeline_parallel_size=2 if name in ("zbv", "dualpipe-v") else 1,
            pipeline_schedule=name,
            recompute=recompute,  # type: ignore[arg-type]
        )
        for name in (None, "gpipe", "zb-h1", "zbv", "dualpipe", "dualpipe-v")
        for recompute in ("none", "selective", "full")
    ]
    many = problem.costs(Candidates.from_configs(configs))
    for index, config in enumerate(configs):
        alone = problem.costs(Candidates.alone(config))
        np.testing.assert_allclose(alone.step_s, many.step_s[index], rtol=1e-12)
        np.testing.assert_allclose(
            alone.memory_total_bytes, many.memory_total_bytes[index], rtol=1e-12
        )
        assert Candidates.from_configs([config]).config(0) == config


@pytest.mark.parametrize(("micro_batches", "legal"), [(14, False), (15, True)])
def test_zbv_needs_a_micro_batch_for_every_stage_there_and_back(
    micro_batches: int, legal: bool
) -> None:
    """2p - 1 of them fill the V of 8 ranks, whose first stage is also the last."""
    work = BASE["training"] | {"global_batch_size": 8 * micro_batches}
    one = estimate(
        query=parse_query(
            BASE | {"training": work, "parallel": BASE["parallel"] | {"pipeline_schedule": "zbv"}}
        ),
        with_fixes=False,
    )
    assert (one.time is not None) is legal
