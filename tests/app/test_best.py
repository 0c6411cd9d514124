"""The pruned search against brute force over everything that is free, and the row that is taken
from it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_tool.cost.candidates import CORE_ATTN, FULL_BLOCK, FULL_UNIFORM, Candidates
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.ranking.best import search_best
from hp_tool.questions.training.ranking.exact import BestSearch
from hp_tool.questions.training.ranking.free_axes import (
    group_stages,
    more_module_sets,
    more_shards,
    more_zero_stages,
    tries_layer_counts,
)
from hp_tool.questions.training.ranking.rank import CostedRows, with_criteria
from hp_tool.space import default_axes, legal_chunks

DENSE = {
    "hidden_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 32000,
    "gated_mlp": True,
    "normalization": "rmsnorm",
}
EXPERTS = DENSE | {
    "hidden_size": 6144,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7168,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}


@st.composite
def small_problems(
    draw: st.DrawFn, *, lengths: tuple[int, ...] = (1024, 4096), framework: str | None = None
) -> TrainingProblem:
    """Spaces small enough to cost in full, of which part fits."""
    framework = framework or draw(st.sampled_from(("megatron-core",) * 3 + ("torch-fsdp",)))
    experts = framework == "megatron-core" and draw(st.booleans())
    shape = (EXPERTS if experts else DENSE) | {
        "num_hidden_layers": draw(st.sampled_from((5, 8, 12)))
    }
    training = {
        "sequence_length": draw(st.sampled_from(lengths)),
        "global_batch_size": draw(st.sampled_from((12, 16))),
        "framework": framework,
        "precision": draw(st.sampled_from(("bf16", "fp8"))),
    }
    parallel = {
        "micro_batch_size": [1, 2],
        "tensor_parallel_size": draw(st.sampled_from(([1, 2], [2, 4]))),
        "expert_tensor_parallel_size": [1, 2] if experts else 1,
    }
    cluster = {
        "gpu": draw(st.sampled_from(("h100-sxm-80gb", "a100-sxm-40gb"))),
        "num_gpus": draw(st.sampled_from((8, 16))),
    }
    if cluster["gpu"].startswith("a100"):
        training["precision"] = "bf16"
    query = {
        "kind": "training",
        "model": shape,
        "cluster": cluster,
        "training": training,
        "parallel": parallel,
    }
    return resolve_training(parse_query(query))


def brute_force(problem: TrainingProblem) -> CostedRows:
    """Every combination of every value, costed."""
    axes, layers = default_axes(query=problem.parallel, case=problem), problem.model.total_layers
    counts = range(1, layers + 1) if tries_layer_counts(problem) else ()
    whole = [(method, n, 0) for n in counts for method in (FULL_BLOCK, FULL_UNIFORM)]
    codes = tuple(dict.fromkeys((*axes.recompute, *more_module_sets(problem, axes), *whole)))
    stages = (
        *more_zero_stages(problem, axes),
        *axes.zero_stage,
    )  # the last stands for all where there is one replica
    everything = replace(
        axes,
        recompute=codes,
        zero_stage=stages,
        data_parallel_shard_size=(0, *more_shards(problem, axes)),
    )
    parts = []
    for chunk in legal_chunks(axes=everything, case=problem):
        c = chunk.candidates.take(slice(None))
        most = -(-layers // (c.pipeline_parallel_size * c.virtual_pipeline_parallel_size))
        repeated = (c.recompute_method == FULL_BLOCK) & (
            c.recompute_num_layers >= most
        )  # the same as full
        repeated |= (c.recompute_method == FULL_UNIFORM) & (c.recompute_num_layers > most)
        c = c.take(
            np.flatnonzero(
                ~repeated
                & (
                    np.isin(c.zero_stage, group_stages(problem, stages))
                    | (c.data_parallel_shard_size == 0)
                )
            )
        )
        parts.append(with_criteria(c, problem.costs(c), problem=problem)[0])
    return CostedRows.concatenate(parts)


def rows_of(rows: CostedRows, values: np.ndarray[Any, Any]) -> set[tuple[float, ...]]:
    columns = [getattr(rows.candidates, f.name) for f in fields(Candidates)]
    return set(zip(*(column.tolist() for column in columns), values.round(9).tolist(), strict=True))


@given(small_problems(), st.sampled_from((1, 5, 20)), st.sampled_from(("expected", "mean")))
def test_it_finds_what_brute_force_finds_and_counts_the_rest(
    problem: TrainingProblem, keep: int, rank_by: Any
) -> None:
    search = BestSearch(problem, keep=keep, rank_by=rank_by).run()
    every = brute_force(problem)
    value, mine = search.value(every), search.value(search.rows)
    near, found = (
        np.flatnonzero(np.isfinite(each) & (each <= search.reach_s)) for each in (value, mine)
    )
    assert rows_of(search.rows.take(found), mine[found]) == rows_of(every.take(near), value[near])
    assert len(np.unique(search.layout[found])) >= keep or len(found) == np.count_nonzero(
        np.isfinite(value)
    )
    assert search.computed + search.pruned == search.combinations == len(every.candidates)


def holds_with_every_exchange(problem: TrainingProblem) -> None:
    best = search_best(problem, keep=1, rank_by="mean")
    every = [brute_force(each) for each in best.problems]
    value = np.concatenate([np.where(rows.acceptable, rows.step_s, np.inf) for rows in every])
    assert len(best.problems) > 3 and best.computed + best.pruned == len(value)
    if np.isfinite(value.min()):
        near = 1.01 * value.min()
        assert np.allclose(
            np.sort(best.value_s[best.value_s <= near]), np.sort(value[value <= near]), rtol=1e-12
        )


WITH_EXCHANGES = small_problems(lengths=(4096,), framework="megatron-core")


@settings(max_examples=5)
@given(WITH_EXCHANGES)
def test_kinds_of_context_parallelism_are_searched_as_exactly(problem: TrainingProblem) -> None:
    holds_with_every_exchange(problem)


@pytest.mark.long
@given(WITH_EXCHANGES)
def test_thirty_spaces_of_all_axes_are_searched_as_exactly(problem: TrainingProblem) -> None:
    holds_with_every_exchange(problem)


def known(case: str, **parallel: Any) -> TrainingProblem:
    model, num_gpus, training = {
        "405b": ("llama-3.1-405b", 2048, {"sequence_length": 8192, "global_batch_size": 2048}),
        "deepseek": (
            "deepseek-v3",
            1024,
            {"sequence_length": 4096, "global_batch_size": 8192, "precision": "fp8"},
        ),
    }[case]
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus}
    query = {
        "kind": "training",
        "model": model,
        "cluster": cluster,
        "training": training,
        "parallel": parallel,
    }
    return resolve_training(parse_query(query))


def first(problem: TrainingProblem, *, rank_by: Any = "expected") -> tuple[float, Candidates]:
    best = search_best(problem, keep=1, rank_by=rank_by)
    return float(best.value_s[0]), best.rows.candidates.take(np.arange(1))


SHORT = ["none", "selective", "full"]


def test_405b_keeps_most_layers_and_recomputes_a_few_of_each_chunk() -> None:
    layout = {"tensor_parallel_size": 8, "pipeline_parallel_size": 16, "context_parallel_size": 1}
    step_s, c = first(known("405b", **layout))
    assert (
        c.recompute_method[0] == FULL_BLOCK
        and step_s < 0.95 * first(known("405b", **layout, recompute=SHORT))[0]
    )
    assert first(known("405b"))[0] < step_s


def test_deepseek_recomputes_sets_of_modules() -> None:
    """On eight stages, which hold too much otherwise."""
    step_s, c = first(known("deepseek", pipeline_parallel_size=8), rank_by="mean")
    sizes = {
        name: getattr(c, name).tolist()
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
    }
    assert (
        c.recompute_modules[0] > CORE_ATTN
        and step_s < 0.95 * first(known("deepseek", **sizes, recompute=SHORT))[0]
    )
