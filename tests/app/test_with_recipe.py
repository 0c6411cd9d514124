"""What a query leaves open: the step with CUDA graphs and with today's recipe, stated beside; free
knobs, taken by rankings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.questions import schema
from hp_tool.questions.answers import answer_estimate
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.schema import parse_query, query_mapping
from hp_tool.questions.training import estimate, recommend
from hp_tool.questions.training.recipes import get_recipe
from hp_tool.wording.fit import cuda_graphs_words, recipe_words, stall_words, usual_settings_words

FEW = {"sequence_length": 1024, "global_batch_size": 64}
"""Tokens of a step that launches bound."""


def dense(training: dict[str, Any] | None = None, **more: Any) -> Query:
    return parse_query(
        {
            "kind": "training",
            "model": "llama-3-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
            "training": {**(training or FEW), **more},
            "parallel": {},
        }
    )


def answered(query: Query) -> Estimate:
    answer = answer_estimate(query).estimate
    assert isinstance(answer, Estimate)
    return answer


def test_an_open_choice_of_graphs_is_in_the_interval_and_stated() -> None:
    bare, without, graphs = (
        estimate(query=dense(**each))
        for each in ({}, {"cuda_graphs": False}, {"cuda_graphs": True})
    )
    assert bare.time == without.time and bare.time is not None and graphs.time is not None
    stated = bare.provenance["with_cuda_graphs"]
    assert isinstance(stated, dict) and stated["step_s"] == pytest.approx(graphs.time.step_s)
    assert bare.intervals and without.intervals and graphs.intervals
    assert bare.intervals.step_s[0] == pytest.approx(graphs.intervals.step_s[0])
    assert bare.intervals.step_s[1] == without.intervals.step_s[1]
    assert (
        "with_cuda_graphs" not in without.provenance
        and "launches limit this step" in cuda_graphs_words(bare)
    )


@pytest.mark.parametrize(
    ("gpu", "assumed"), [("h100-sxm-80gb", True), ("gb300", True), ("a100-sxm-80gb", False)]
)
def test_graphs_are_assumed_where_recipes_of_such_gpus_record_them(gpu: str, assumed: bool) -> None:
    query = dense({**FEW, "precision": "bf16"})
    query = replace(query, cluster=replace(query.cluster, gpu=gpu))  # type: ignore[arg-type]
    bare, answer = estimate(query=query), answered(query)
    assert bare.time is not None and answer.time is not None and answer.intervals is not None
    assert ("usual" in answer.provenance) == assumed
    if not assumed:
        assert answer.time == bare.time
        return
    graphs = bare.provenance["with_cuda_graphs"]["step_s"]  # type: ignore[index]
    assert answer.time.step_s == pytest.approx(graphs)
    assert answer.intervals.step_s[1] >= bare.time.step_s
    assert "Assumes cuda_graphs true" in usual_settings_words(answer)
    settled = answered(
        replace(query, training=replace(query.training, cuda_graphs=False))  # type: ignore[type-var]
    )
    assert settled.time == bare.time and "usual" not in settled.provenance


def test_a_mixture_is_answered_by_today_s_recipe() -> None:
    query = parse_query(
        {
            "kind": "training",
            "model": "qwen3-30b-a3b",
            "cluster": {"gpu": "b200-sxm-180gb", "num_gpus": 8},
            "training": {
                "sequence_length": 4096,
                "global_batch_size": 512,
                "precision": "mxfp8",
            },
            "parallel": {"expert_parallel_size": 8, "micro_batch_size": 4},
        }
    )
    bare, answer = estimate(query=query), answered(query)
    newest = get_recipe("megatron-bridge").name
    named = answered(
        parse_query(schema.set_paths(query_mapping(query), {"training.recipe": newest}))
    )
    assert bare.time is not None and answer.time is not None and named.time is not None
    assert answer.time == named.time and answer.time.step_s < bare.time.step_s
    assert answer.intervals is not None and named.intervals is not None
    assert answer.intervals.step_s == (
        named.intervals.step_s[0],
        max(named.intervals.step_s[1], bare.time.step_s),
    )
    assert answer.narrowest is not None
    assert answer.narrowest.set == {"training.recipe": newest}
    assert "usual" not in named.provenance


def test_a_step_that_no_launch_bounds_has_one_interval() -> None:
    assert (
        "with_cuda_graphs"
        not in estimate(query=dense({"sequence_length": 8192, "global_batch_size": 512})).provenance
    )


def test_today_s_recipe_is_stated_beside_and_can_be_written() -> None:
    query = dense(precision="fp8")
    bare = answered(query)
    stated = bare.with_recipe
    assert stated is not None and stated.recipe == get_recipe("megatron-bridge").name
    assert (
        stated.changes["training.gradient_precision"] == "bf16"
        and stated.gains["training.gradient_precision"] > 1.0
    )
    named = answered(parse_query(schema.set_paths(query_mapping(query), stated.set)))
    assert (
        named.time is not None and named.time.step_s == stated.step_s and named.with_recipe is None
    )
    assert recipe_words(bare).startswith(f"With recipe {stated.recipe}: ")
    assert "bf16 gradients" in recipe_words(bare)


def test_the_release_that_is_named_names_its_recipe() -> None:
    stated = answered(dense(framework_version="26.04")).with_recipe
    assert stated is not None and stated.recipe == "megatron-bridge-26.04"


def test_audited_adapters_have_a_recipe_on_cards_without_nvlink() -> None:
    query = parse_query(
        {
            "kind": "training",
            "model": "llama-2-70b",
            "cluster": {"gpu": "l40s-48gb", "num_gpus": 64},
            "training": {
                "sequence_length": 8192,
                "global_batch_size": 8,
                "precision": "fp8",
                "task": "lora",
                "lora": {"rank": 16},
            },
            "parallel": {"tensor_parallel_size": 4, "context_parallel_size": 2},
        }
    )
    bare = answered(query)
    assert not bare.feasible and bare.with_recipe is not None and bare.with_recipe.feasible
    assert bare.with_recipe.recipe == "mlperf-training-5.0"


@pytest.mark.parametrize("more", [{"framework": "torch-fsdp"}, {"recipe": "megatron-bridge"}])
def test_others_have_none(more: dict[str, Any]) -> None:
    assert answered(dense(**more)).with_recipe is None


def test_what_a_recipe_s_own_layout_alone_can_run_is_left_out() -> None:
    """The recipe hides all-to-alls, which needs experts on several ranks."""
    query = parse_query(
        {
            "kind": "training",
            "model": "qwen3-30b-a3b",
            "cluster": {"gpu": "gb200-nvl72", "num_gpus": 8},
            "training": {"sequence_length": 4096, "global_batch_size": 512, "precision": "mxfp8"},
            "parallel": {},
        }
    )
    stated = answered(query).with_recipe
    assert stated is not None and stated.set["training.overlap"]["expert_parallel"] is False


def test_a_ranking_takes_free_knobs_where_they_save_a_step_something() -> None:
    query = dense()
    first = recommend(query=query, top=1).recommendations[0]
    assert first.set["training.cuda_graphs"] is True
    again = estimate(query=Configuration.from_row(first, query=query).query)
    assert again.time == first.estimate.time and again.intervals == first.estimate.intervals
    for settled in (dense(cuda_graphs=False), dense(recipe="megatron-bridge")):
        assert "training.cuda_graphs" not in recommend(query=settled, top=1).recommendations[0].set


@pytest.mark.parametrize("graphs", [True, False])
def test_a_query_that_names_graphs_leaves_other_knobs_free(graphs: bool) -> None:
    query = dense({"sequence_length": 8192, "global_batch_size": 512}, cuda_graphs=graphs)
    first = recommend(query=query, top=1).recommendations[0]
    assert (
        first.set["training.cross_entropy"] == "fused" and "training.cuda_graphs" not in first.set
    )


def test_slow_steps_are_named_where_they_widen_the_interval() -> None:
    bare, often, rare = (
        estimate(query=dense()),
        {"probability": 0.12, "slowdown": 5.0},
        {"probability": 0.04, "slowdown": 5.0},
    )
    full, stalls, seldom, learnt = (
        stall_words(replace(bare, provenance=bare.provenance | each))
        for each in (
            {"nearly_full": rare},
            {"calibration": {}, "stalls": often, "nearly_full": often},
            {"calibration": {}, "stalls": rare},
            {"calibration": {}, "nearly_full": often},
        )
    )
    assert full == (
        "4.0% chance that the allocator retries, because memory is nearly full: a step then takes "
        "5.0 times as long"
    )
    assert (
        stalls.startswith("12.0% chance of a stall, as observed on this cluster")
        and stall_words(bare) == seldom == learnt == ""
    )


def test_a_recipe_whose_graphs_exclude_the_recomputation_is_answered_with_whole_iterations() -> (
    None
):
    query = parse_query(
        {
            "kind": "training",
            "model": "qwen3-30b-a3b",
            "cluster": {"gpu": "gb200-nvl72", "num_gpus": 16},
            "training": {"sequence_length": 4096, "global_batch_size": 512},
            "parallel": {
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "expert_parallel_size": 8,
                "recompute": "full",
                "micro_batch_size": 1,
            },
        }
    )
    figure = answered(query).with_recipe
    assert figure is not None and figure.set["training.cuda_graphs"] is True


def test_what_a_recipe_gains_by_dropping_tokens_is_stated() -> None:
    """No query can state that an expert's capacity is unlimited beside a recipe that limits it."""
    query = parse_query(
        {
            "kind": "training",
            "model": "qwen3-30b-a3b",
            "cluster": {"gpu": "b200-sxm-180gb", "num_gpus": 64},
            "training": {
                "sequence_length": 4096,
                "global_batch_size": 512,
                "framework_version": "25.09",
                "expert_imbalance": 1.5,
            },
            "parallel": {"expert_parallel_size": 4},
        }
    )
    stated = answered(query).with_recipe
    assert stated is not None and stated.changes["training.expert_capacity_factor"] == 1.0
    assert stated.gains["training.expert_capacity_factor"] > 1.0
