"""Recipes: what a query leaves open is as the recipe has it, what it writes stays, and the answer
says which was which.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hp_tool.catalog import library
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.strategy_legality import find_violations
from hp_tool.domain.knobs import OF_RECIPES
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery, Recompute, recompute_name
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import HpToolError, NotFoundError
from hp_tool.formats.exchange import export
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training import estimate, recommend
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.recipes import (
    PARALLEL_KNOBS,
    get_recipe,
    list_recipes,
)

NEWEST = "megatron-bridge-26.06"


def mixture(training: dict[str, Any] | None = None, **parallel: Any) -> dict[str, Any]:
    return {
        "kind": "training",
        "model": "qwen3-30b-a3b",
        "cluster": {"gpu": "gb200-nvl72", "num_gpus": 8},
        "training": {
            "sequence_length": 4096,
            "global_batch_size": 512,
            "precision": "mxfp8",
            **(training or {}),
        },
        "parallel": {"expert_parallel_size": 8, "micro_batch_size": 4, **parallel},
    }


def resolved(query: dict[str, Any]) -> TrainingProblem:
    return resolve_training(parse_query(query))


def assumed(query: dict[str, Any]) -> dict[str, Any]:
    found = estimate(query=parse_query(query)).provenance["assumed"]
    assert isinstance(found, dict)
    return found


def test_a_recipe_fills_what_the_query_leaves_open() -> None:
    problem = resolved(mixture({"recipe": NEWEST}))
    workload = problem.workload
    assert (workload.gradient_precision, workload.parameter_precision, workload.cross_entropy) == (
        "bf16",
        "fp8",
        "in_place",
    )
    assert workload.cuda_graphs and workload.merges_passes and workload.framework_version == "26.06"
    assert problem.strategy.moe_token_dispatcher_type == "flex"
    step = estimate(query=parse_query(mixture({"recipe": NEWEST}))).time
    plain = estimate(query=parse_query(mixture())).time
    assert step is not None and plain is not None and step.step_s < 0.7 * plain.step_s


def test_what_a_recipe_says_of_parallel_is_what_runs() -> None:
    sizes = {
        "pipeline_parallel_size": 4,
        "virtual_pipeline_parallel_size": 4,
        "expert_parallel_size": 64,
    }
    query = mixture({"recipe": NEWEST}, **sizes, micro_batch_size=1)
    query |= {"model": "deepseek-v3", "cluster": {"gpu": "gb200-nvl72", "num_gpus": 256}}
    found = estimate(query=parse_query(query))
    assert (
        found.feasible
        and found.parallel is not None
        and recompute_name(found.parallel.recompute) == "selective mla_up_proj"
    )
    assert found.parallel.moe_token_dispatcher_type == "flex"
    spelled = {**query, "parallel": to_dict(found.parallel)}
    assert estimate(query=parse_query(spelled)).time == found.time, (
        "the answer's parallel is valid input"
    )
    ranked = recommend(query=parse_query(query), top=3).recommendations
    assert {recompute_name(row.parallel.recompute) for row in ranked} == {"selective mla_up_proj"}
    written = {**query, "parallel": {**query["parallel"], "recompute": "none"}}
    plain = estimate(query=parse_query(written))
    assert (
        plain.memory is not None
        and found.memory is not None
        and plain.memory.total_bytes > found.memory.total_bytes
    )


def test_written_keys_win_each_on_its_own() -> None:
    written = {
        "recipe": NEWEST,
        "gradient_precision": "fp32",
        "cuda_graphs": False,
        "cross_entropy": "unfused",
    }
    problem = resolved(
        mixture(
            {**written, "overlap": {"data_parallel": False}}, moe_token_dispatcher_type="alltoall"
        )
    )
    workload = problem.workload
    assert (
        workload.gradient_precision == "fp32"
        and not workload.cuda_graphs
        and workload.loss == "unfused"
    )
    assert workload.parameter_precision == "fp8", "what is not written is still the recipe's"
    assert (
        workload.overlap is not None
        and workload.overlap.data_parallel is False
        and workload.overlap.expert_parallel is True
    )
    assert problem.strategy.moe_token_dispatcher_type == "alltoall"


def test_what_is_offloaded_and_how_much_go_together() -> None:
    query = mixture({"recipe": NEWEST, "precision": "fp8"})
    query |= {
        "model": "llama-3-70b",
        "cluster": {"gpu": "gb200-nvl72", "num_gpus": 64},
        "parallel": {"micro_batch_size": 2},
    }
    offloads = resolved(query).workload
    assert (offloads.offload, offloads.offload_fraction) == ("activations", 0.5)
    kept = resolved({**query, "training": {**query["training"], "offload": "none"}}).workload
    assert (kept.offload, kept.offload_fraction) == ("none", None)


def test_the_answer_names_each_knob_that_was_left_open_with_its_value() -> None:
    named = assumed(mixture({"recipe": NEWEST, "gradient_precision": "fp32"}))
    assert "training.gradient_precision" not in named
    assert named["training.cuda_graphs"] is True and named["training.cross_entropy"] == "in_place"
    assert (
        named["parallel.moe_token_dispatcher_type"] == "flex"
        and named["parallel.expert_tensor_parallel_size"] == 1
    )
    defaults = assumed(mixture())
    assert (
        defaults["training.gradient_precision"] == "fp32"
        and defaults["training.cross_entropy"] == "unfused"
    )
    assert (
        defaults["training.cuda_graphs"] is False
        and defaults["parallel.moe_token_dispatcher_type"] == "alltoall"
    )
    dense = assumed({**mixture(), "model": "llama-3-8b", "parallel": {}})
    assert not any("expert" in key or "moe" in key for key in dense), (
        "experts' knobs are of no matter to a dense model"
    )
    first = recommend(query=parse_query(mixture({"recipe": NEWEST})), top=1).recommendations[0]
    assert first.estimate.provenance["assumed"] == assumed(mixture({"recipe": NEWEST}))


def test_a_recipe_of_another_framework_brings_it() -> None:
    query = mixture({"recipe": "trl", "precision": "bf16"})
    query |= {"model": "llama-3-8b", "parallel": {}}
    assert (
        resolved(query).workload.framework == "hf-trainer"
        and resolved(query).workload.loss == "chunked"
    )
    assert assumed(query)["training.framework"] == "hf-trainer"


def test_a_recipe_by_its_date() -> None:
    query = {
        **mixture({"recipe": "trl-1.6", "precision": "bf16"}),
        "model": "llama-3-8b",
        "parallel": {},
    }
    assert resolved(query).workload.loss == "unfused"
    assert get_recipe("trl") == get_recipe("trl-1.7")


def test_deepseek_s_recipe_keeps_its_model_in_memory() -> None:
    layout = {
        "pipeline_parallel_size": 16,
        "expert_parallel_size": 64,
        "pipeline_schedule": "dualpipe",
        "micro_batch_size": 1,
    }
    training = {"sequence_length": 4096, "global_batch_size": 15360, "precision": "fp8"}
    query = {
        "kind": "training",
        "model": "deepseek-v3",
        "cluster": {"gpu": "h800-sxm-80gb", "num_gpus": 2048},
        "training": {**training, "recipe": "deepseek-v3"},
        "parallel": layout,
    }
    named, bare = (
        estimate(query=parse_query({**query, "training": each}))
        for each in (query["training"], training)
    )
    assert named.feasible and named.memory is not None and bare.memory is not None
    saved = {
        part: bare.memory.parts_bytes[part] - size
        for part, size in named.memory.parts_bytes.items()
    }
    assert saved["activations"] > 50 * 2**30 and saved["optimizer"] > 2**30
    assert named.familiarity is not None and named.familiarity.unmeasured == ()


def test_when_gradients_are_reduced_belongs_to_the_sharding() -> None:
    query = {
        **mixture({"recipe": "llama-3-405b", "precision": "bf16"}),
        "model": "llama-3-8b",
        "parallel": {},
    }
    assert (
        resolved(query).workload.gradient_reduction == "run"
        and resolved(query).parallel.zero_stage == 2
    )
    assert resolved({**query, "parallel": {"zero_stage": 3}}).workload.gradient_reduction is None


def test_a_written_default_is_the_same_measurement_as_one_left_out() -> None:
    plain = resolved(mixture()).workload
    assert resolved(mixture({"cross_entropy": "unfused", "cuda_graphs": False})).workload == plain
    names = {"recipe": NEWEST}
    spelled = {
        "gradient_precision": "bf16",
        "parameter_precision": "fp8",
        "cross_entropy": "in_place",
        "cuda_graphs": True,
        "overlap": {"expert_parallel": True},
        "framework_version": "26.06",
    }
    assert resolved(mixture(names)).workload == resolved(mixture(spelled)).workload


def test_rules_hold_for_their_trainings_alone() -> None:
    cut = {"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16}}
    on_h100 = resolved({**mixture({"recipe": NEWEST, "precision": "fp8"}), **cut}).workload
    assert not on_h100.cuda_graphs and on_h100.fp8_recipe == "tensorwise"
    lora = mixture({"recipe": "mlperf-training-5.0", "task": "lora", "precision": "fp8"})
    lora |= {"model": "llama-2-70b", "parallel": {"tensor_parallel_size": 4}}
    adapters = resolved(lora).workload
    assert (
        adapters.frozen_precision == "fp8"
        and adapters.lora is not None
        and adapters.lora.rank == 16
    )
    assert adapters.parameter_precision is None, (
        "only what is trained is kept quantised by rows and columns"
    )


@pytest.mark.parametrize(
    ("gpu", "gpus", "graphs"),
    [
        ("b200-sxm-180gb", 64, True),
        ("gb200-nvl72", 8, False),
        ("gb200-nvl72", 32, True),
        ("gb300-nvl72", 72, True),
        ("gb300-nvl72", 8, False),
        ("b300-sxm-288gb", 64, True),  # in no audited run
        ("h100-sxm-80gb", 32, False),
        ("h100-sxm-80gb", 64, True),
        ("h200-sxm-141gb", 64, True),
        ("mi355x-288gb", 64, False),  # as AMD's
    ],
)
def test_audited_adapters_are_recorded_as_graphs_on_many_gpus(
    gpu: str, gpus: int, graphs: bool
) -> None:
    lora = mixture(
        {
            "recipe": "mlperf-training-5.0",
            "task": "lora",
            "precision": "fp8",
            "global_batch_size": gpus,
        }
    )
    lora |= {"model": "llama-2-70b", "parallel": {}, "cluster": {"gpu": gpu, "num_gpus": gpus}}
    assert bool(resolved(lora).workload.cuda_graphs) is graphs


def test_every_recipe_of_the_catalogue_is_read_and_changes_something() -> None:
    names = [each.name for each in list_recipes()]
    assert NEWEST in names and len(names) > 8
    for name in names:
        task = {"task": "lora", "lora": {"rank": 16}} if name.startswith("mlperf") else {}
        query = {**mixture({"recipe": name, **task}), "model": "llama-3-8b", "parallel": {}}
        assert (
            resolved(query).workload
            != resolved({**query, "training": {**query["training"], "recipe": None}}).workload
        )
    assert get_recipe("megatron-bridge") == get_recipe(
        [name for name in names if name.startswith("megatron")][-1]
    )


def test_what_a_recipe_sets_is_exported() -> None:
    text = export(result=mixture({"recipe": NEWEST}), format="megatron-lm")
    flags = (
        "--moe-token-dispatcher-type flex",
        "--grad-reduce-in-bf16",
        "--fp8-param-gather",
        "--cross-entropy-fusion-impl te",
        "--cuda-graph-scope full_iteration",
        "--overlap-moe-expert-parallel-comm",
    )
    for flag in flags:
        assert flag in text
    bridge = export(result=mixture({"recipe": NEWEST}), format="nemo")
    assert (
        "model.moe_token_dispatcher_type=flex" in bridge
        and "model.cross_entropy_fusion_impl=te" in bridge
    )


def test_an_unknown_name_names_its_nearest() -> None:
    with pytest.raises(NotFoundError, match=r"megatron-bridge-26\.06") as error:
        resolved(mixture({"recipe": "megatron-bridge-26.6"}))
    assert error.value.field == "training.recipe"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipes").mkdir()
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_seen", None)
    return tmp_path / "recipes"


def keep(folder: Path, **fields: Any) -> None:
    (folder / "ours.json").write_text(
        json.dumps({"source": "ours", "description": "what we set", **fields})
    )
    library.clear_cache()


def test_one_s_own_recipe_extends_another(own: Path) -> None:
    keep(
        own,
        extends=NEWEST,
        rules=[{"training": {"optimizer_precision": "bf16", "cuda_graphs": None}}],
    )
    workload = resolved(mixture({"recipe": "ours"})).workload
    assert workload.optimizer_precision == "bf16" and workload.gradient_precision == "bf16"
    assert workload.cuda_graphs is None, "null takes an earlier rule's value back"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"rules": [{"training": {"sequence_length": 4096}}]},
            "sequence_length cannot be set by a recipe",
        ),
        ({"rules": [{"training": {"gradient_precision": "fp7"}}]}, "gradient_precision"),
        ({"rules": [{"when": {}}]}, "unknown key"),
        ({"rules": [{"precisions": ["fp7"]}]}, "precisions"),
        ({"extends": "ours", "rules": []}, "extends itself"),
        ({"extends": "nothing", "rules": []}, "unknown recipe 'nothing'"),
        ({"rules": {"training": {}}}, "rules"),
    ],
)
def test_a_malformed_recipe_says_where_and_why(
    own: Path, fields: dict[str, Any], words: str
) -> None:
    keep(own, **fields)
    with pytest.raises(HpToolError, match=words) as error:
        resolved(mixture({"recipe": "ours"}))
    assert error.value.field == "training.recipe"


@pytest.mark.parametrize(
    ("gpu", "precision", "modules", "recomputed"),
    [
        ("b200-sxm-180gb", "bf16", ("attn", "mamba", "moe_router", "moe_preprocess"), None),
        ("gb300-nvl72", "mxfp8", ("attn", "mamba", "moe_router", "moe_preprocess"), None),
        ("h100-sxm-80gb", "bf16", ("attn", "mamba"), ("layernorm", "moe")),
        ("h100-sxm-80gb", "fp8", ("mamba",), ("layernorm",)),
        ("h200-sxm-141gb", "bf16", ("attn", "mamba"), ("layernorm", "moe")),
    ],
)
def test_a_hybrid_has_the_settings_of_its_own_presets(
    gpu: str, precision: str, modules: tuple[str, ...], recomputed: tuple[str, ...] | None
) -> None:
    training = {"recipe": "megatron-bridge-26.08", "precision": precision, "global_batch_size": 512}
    query = {
        **mixture(training),
        "model": "nemotron-3-nano-30b-a3b",
        "cluster": {"gpu": gpu, "num_gpus": 16},
        "parallel": {},
    }
    problem = resolved(query)
    assert problem.workload.cuda_graphs and problem.workload.cuda_graph_modules == modules
    recompute = problem.parallel.recompute
    assert recomputed == (recompute.modules if isinstance(recompute, Recompute) else None)


def test_every_recipe_is_one_that_megatron_core_starts() -> None:
    """What a recipe sets goes together on every GPU and at every size, also where no preset names
    it.
    """
    for name, model, gpu, num_gpus in itertools.product(
        [each.name for each in list_recipes() if each.name.startswith("megatron-bridge")],
        (
            "llama-3-8b",
            "qwen3-30b-a3b",
            "deepseek-v3",
            "gpt-oss-20b",
            "mixtral-8x7b",
            "nemotron-3-super-120b-a12b",
        ),
        ("h200-sxm-141gb", "b300-sxm-288gb", "gb300-nvl72"),
        (8, 1024),
    ):
        if (
            model.startswith("nemotron") and name < "megatron-bridge-26.02.01"
        ):  # merged passes of hybrids are not modelled
            continue
        query = {**mixture({"recipe": name, "precision": "fp8"}), "model": model, "parallel": {}}
        problem = resolved(query | {"cluster": {"gpu": gpu, "num_gpus": num_gpus}})
        recompute = problem.parallel.recompute
        if not isinstance(recompute, Recompute):
            continue
        experts = 8 if problem.model.num_experts else 1
        alone = Candidates.alone(ParallelConfig(recompute=recompute, expert_parallel_size=experts))
        assert not any(map(bool, find_violations(case=problem, candidates=alone))), (
            name,
            model,
            gpu,
            num_gpus,
        )


def test_a_knob_that_recipes_set_is_open_until_a_query_sets_it() -> None:
    """A recipe fills what is None: a knob with another default would ignore every recipe."""
    for kind, knobs in ((TrainingWorkload, OF_RECIPES), (ParallelQuery, PARALLEL_KNOBS)):
        defaults = {each.name: each.default for each in fields(kind)}
        assert {name for name in knobs if defaults[name] is not None} == set()
