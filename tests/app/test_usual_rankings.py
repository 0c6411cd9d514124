"""A ranking assumes for each row what an estimate of the row assumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.catalog import library
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.strategy_legality import excluded_layouts
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Fix, Recommendation
from hp_tool.errors import UnsupportedError
from hp_tool.questions.answers import answer_estimate, answer_recommend
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import recommend
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.usual_settings import usual_problems
from hp_tool.space import default_axes, legal_chunks

GPU = "h100-sxm-80gb"
NARROW = {
    "tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "virtual_pipeline_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
}
"""Axes of a space that takes a second."""
SIZES = (8, 16, 64, 256)
MODELS = tuple(entry.name for entry in library.entries("models"))
SAMPLED = (
    ("mixtral-8x7b", 8),  # fits with offload alone
    ("qwen3-30b-a3b", 16),  # its overlap excludes some layouts, its graphs others
    ("qwen3-235b-a22b", 16),  # the recipe's overlap excludes some layouts; nothing fits
    ("gpt3-175b", 8),  # nothing fits
    ("solar-open-100b", 64),  # rows without expert parallelism leave the dispatcher open
    ("nemotron-3-nano-30b-a3b", 64),  # the recipe records modules of unlike layers
    ("xglm-564m", 64),  # launches limit some steps
    ("gpt2", 256),
    ("llama-3-8b", 64),
    ("t5-small", 16),
)


def ranked(model: str, num_gpus: int, *, gpu: str = GPU, **more: Any) -> Query:
    return parse_query(
        {
            "kind": "training",
            "model": model,
            "cluster": {"gpu": gpu, "num_gpus": num_gpus},
            "training": {"sequence_length": 4096, "global_batch_size": 512},
        }
        | more
    )


def estimated(row: Recommendation | Fix, query: Query) -> Estimate:
    estimate = answer_estimate(Configuration.from_row(row, query=query).query).estimate
    assert isinstance(estimate, Estimate)
    return estimate


def check(row: Recommendation, query: Query) -> None:
    """The row is the estimate of its settings."""
    own, alone = row.estimate, estimated(row, query)
    assert own.time and own.memory and own.intervals
    assert alone.time and alone.memory and alone.intervals
    assert own.time.step_s == pytest.approx(alone.time.step_s, rel=1e-9)
    assert own.time.parts_s == pytest.approx(alone.time.parts_s, rel=1e-9, abs=1e-12)
    assert own.memory.total_bytes == pytest.approx(alone.memory.total_bytes, rel=1e-9)
    assert own.intervals.step_s == pytest.approx(alone.intervals.step_s, rel=1e-9)
    assert own.feasible == alone.feasible
    usual, again = (each.provenance.get("usual") for each in (own, alone))
    assert (usual is None) == (again is None)
    if isinstance(usual, dict) and isinstance(again, dict):
        assert usual["set"] == again["set"]


def check_ranking(model: str, num_gpus: int, *, gpu: str = GPU) -> None:
    query = ranked(model, num_gpus, gpu=gpu)
    try:
        ranking = recommend(query=query, top=3)
    except UnsupportedError:  # no framework runs it
        return
    rows = ranking.recommendations or ranking.nearest_misses
    assert rows
    for row in rows:
        check(row, query)


@pytest.mark.parametrize(("model", "num_gpus"), SAMPLED)
def test_rows_are_estimates_of_their_settings(model: str, num_gpus: int) -> None:
    check_ranking(model, num_gpus)


@pytest.mark.components
@pytest.mark.parametrize("num_gpus", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_rows_of_every_model_are_estimates_of_their_settings(model: str, num_gpus: int) -> None:
    check_ranking(model, num_gpus)


@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "b200-sxm-180gb"])
def test_rows_on_other_gpus_are_estimates_of_their_settings(gpu: str) -> None:
    check_ranking("qwen3-30b-a3b", 8, gpu=gpu)


def test_a_row_has_its_assumptions_beside_its_settings() -> None:
    query = ranked("mixtral-8x7b", 64)
    (row,) = recommend(query=query, top=1).recommendations
    usual = row.estimate.provenance["usual"]
    assert isinstance(usual, dict) and "training.recipe" in usual["set"]
    assert "training.recipe" not in row.set
    assert Configuration.from_row(row, query=query).query.training == query.training


def test_the_settings_of_a_query_replace_usual_ones() -> None:
    """With a recipe of its own, a query assumes none."""
    stated = {"sequence_length": 4096, "global_batch_size": 512, "recipe": "megatron-bridge"}
    query = ranked("mixtral-8x7b", 64, training=stated)
    (row,) = recommend(query=query, top=1).recommendations
    assert "usual" not in row.estimate.provenance
    check(row, query)


def test_the_fewest_gpus_and_deadlines_are_of_the_rows_settings() -> None:
    query = ranked(
        "mixtral-8x7b",
        64,
        training={"sequence_length": 4096, "global_batch_size": 512, "total_tokens": 1e12},
        parallel=NARROW,
        objective="min_gpus",
        constraints={"max_days": 70.0},
    )
    answer = answer_recommend(query, top=1, pareto="gpus", sensitivity=True)
    (row,) = answer.recommendations
    assert isinstance(row, Recommendation) and row.set["cluster.num_gpus"] < 64
    check(row, query)
    assert answer.pareto is not None and answer.sensitivity is not None
    for point in answer.pareto:
        check(point, query)
    assert answer.sensitivity.start is not None and row.estimate.time is not None
    assert answer.sensitivity.start.step_s == row.estimate.time.step_s
    # Nothing that is better than the cluster makes rank 1 slower.
    assert all((change.change_fraction or 0.0) <= 1e-9 for change in answer.sensitivity.hardware)


def test_the_memory_front_is_of_the_rows_settings() -> None:
    query = ranked("xglm-564m", 64)
    answer = answer_recommend(query, top=1, pareto="memory")
    assert answer.pareto
    assert any("usual" in point.estimate.provenance for point in answer.pareto)
    for point in answer.pareto:
        check(point, query)


def test_listed_values_have_usual_settings_each() -> None:
    listed = {"sequence_length": 4096, "global_batch_size": 512, "precision": ["bf16", "fp8"]}
    query = ranked("qwen3-30b-a3b", 16, training=listed, parallel=NARROW)
    for row in recommend(query=query, top=3).recommendations:
        check(row, query)


def test_a_fix_is_the_estimate_of_its_settings() -> None:
    query = ranked("mixtral-8x7b", 8, parallel={"expert_parallel_size": 8, "micro_batch_size": 8})
    answer = answer_estimate(query).estimate
    assert isinstance(answer, Estimate) and not answer.feasible and answer.fixes
    for fix in answer.fixes:
        alone = estimated(fix, query)
        assert alone.feasible and alone.time is not None
        assert fix.step_s == pytest.approx(alone.time.step_s, rel=1e-9)


def test_each_layout_belongs_to_one_of_the_usual_problems() -> None:
    """To the first whose rules accept it, and the rules are what `excluded_layouts` lists."""
    query = ranked("qwen3-30b-a3b", 64)
    plain = resolve_training(query)
    problems = usual_problems(replace(plain, asked=query))
    assert len(problems) == 3
    axes = default_axes(query=query.parallel, case=plain)
    (*_, chunk) = legal_chunks(case=plain, axes=axes)
    rows: Candidates = chunk.candidates.take(slice(0, 20_000))
    belong = np.stack([p.usual.belong(rows, problem=p) for p in problems if p.usual is not None])
    assert (belong.sum(axis=0) == 1).all() and belong.any(axis=1).all()
    legal = np.stack([legality(case=each, candidates=rows) == 0 for each in problems])
    assert (np.argmax(legal, axis=0) == np.argmax(belong, axis=0)).all()
    for first, rules in zip(legal, map(excluded_layouts, problems), strict=True):
        for second, more in zip(legal, map(excluded_layouts, problems), strict=True):
            assert not (rules <= more) or not (second & ~first).any()
