"""Generated recipes: rules give back the presets they were made from, and stand in for those they
were not.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.data import folder_named
from benchmarks.recipes.__main__ import CATALOGUE, LAYOUTS
from benchmarks.recipes.check import parse_recipes, score, score_unseen
from benchmarks.recipes.layouts import render_layouts
from benchmarks.recipes.presets import TABLE, Preset, read_presets
from benchmarks.recipes.rules import release_rules
from benchmarks.recipes.write import render_recipes
from hp_tool import catalog
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import HpToolError
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.recipes import get_recipe, recipe_settings

FIELDS = (
    "release",
    "model",
    "system",
    "precision",
    "task",
    "gpus",
    "gbs",
    "etp",
    "fsdp",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "offload_layers",
    "recompute_num_layers",
    "recompute_modules",
    "ep_overlap",
    "dispatcher",
    "overlap_grad_reduce",
    "overlap_param_gather",
)


def row(model: str, system: str, precision: str = "bf16", **values: Any) -> dict[str, Any]:
    blank = dict.fromkeys(FIELDS, "")
    return blank | {
        "release": "26.02",
        "model": model,
        "system": system,
        "precision": precision,
        "task": "Pre-Training",
        "gpus": 64,
        "gbs": 512,
        **values,
    }


def table(folder: Path, *rows: dict[str, Any]) -> list[Preset]:
    with (folder / f"{TABLE}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    return read_presets(folder)


MIXTURES = [
    row("qwen3_30b_a3b", "h100", dispatcher="alltoall", ep_overlap="True"),
    row(
        "qwen3_30b_a3b",
        "gb200",
        dispatcher="flex_hybridep",
        cuda_graph_impl="local",
        cuda_graph_modules="full_iteration",
    ),
    row("qwen3_235b_a22b", "h100", dispatcher="alltoall", ep_overlap="True"),
    row(
        "qwen3_235b_a22b",
        "gb200",
        dispatcher="flex_hybridep",
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules="attn+moe_router",
    ),
    row("gpt_oss_120b", "gb200", dispatcher="flex_hybridep", cuda_graph_impl="local"),
    row(
        "deepseek_v3",
        "h100",
        dispatcher="flex_deepep",
        ep_overlap="True",
        recompute_modules="mla_up_proj+mlp",
    ),
    row("llama3_70b", "h100", "fp8_cs"),
    row(
        "llama3_70b",
        "gb200",
        fsdp="True",
        offload_layers="20",
        cuda_graph_impl="none",
        cuda_graph_modules="full_iteration",
    ),
    row("llama3_70b", "gb200", gpus=256, gbs=2048),
]


def test_rules_give_back_every_preset(tmp_path: Path) -> None:
    listed = table(
        tmp_path,
        *MIXTURES,
        *(each | {"release": "26.04", "dispatcher": "alltoall"} for each in MIXTURES[:2]),
    )
    result = score(listed, render_recipes(release_rules(listed)))
    assert result.share == 1.0 and result.compared.total() > 80


def test_a_later_release_writes_only_what_changed(tmp_path: Path) -> None:
    listed = table(tmp_path, *MIXTURES, *(each | {"release": "26.04"} for each in MIXTURES))
    assert [len(release.rules) for release in release_rules(listed)][1] == 0


def test_a_model_that_is_not_listed_has_what_most_of_its_kind_have(tmp_path: Path) -> None:
    listed = table(tmp_path, *(each for each in MIXTURES if each["model"] != "qwen3_235b_a22b"))
    (made,) = parse_recipes(render_recipes(release_rules(listed))).values()
    workload = TrainingWorkload(sequence_length=4096, global_batch_size=512)
    model = catalog.model("qwen3-235b-a22b")

    def knobs(gpu: str) -> dict[str, Any]:
        values = recipe_settings(
            made, model=model, gpu=catalog.gpu(gpu), num_gpus=64, workload=workload
        )
        return {**values["training"], **values["parallel"]}

    assert knobs("h100-sxm-80gb")["overlap"] == {"expert_parallel": True}
    assert (
        knobs("gb200-nvl72")["cuda_graphs"] is True
        and knobs("gb200-nvl72")["moe_token_dispatcher_type"] == "flex"
    )
    assert knobs("h200-sxm-141gb") == knobs("h100-sxm-80gb"), "the same die"
    assert knobs("gb300-nvl72") == knobs("gb200-nvl72"), "as large an NVLink domain"
    scores = score_unseen(listed)
    assert scores["qwen3-30b-a3b"].share < 1.0, "nothing else is known of it"


def test_what_memory_needs_is_not_carried_to_another_model(tmp_path: Path) -> None:
    listed = table(tmp_path, row("llama3_70b", "gb200", fsdp="True", offload_layers="20"))
    (made,) = parse_recipes(render_recipes(release_rules(listed))).values()
    workload = TrainingWorkload(sequence_length=8192, global_batch_size=512)
    gpu = catalog.gpu("gb200-nvl72")
    other = recipe_settings(
        made, model=catalog.model("llama-3.1-405b"), gpu=gpu, num_gpus=64, workload=workload
    )
    assert "offload" not in other["training"] and "zero_stage" not in other["parallel"]
    same = recipe_settings(
        made, model=catalog.model("llama-3.3-70b"), gpu=gpu, num_gpus=64, workload=workload
    )
    assert same["training"]["offload_fraction"] == 0.25 and same["parallel"]["zero_stage"] == 3, (
        "a model of the same shape"
    )


def test_what_the_columns_leave_out_or_switch_off(tmp_path: Path) -> None:
    graphs = {"dispatcher": "flex_hybridep", "cuda_graph_impl": "transformer_engine"}
    listed = table(
        tmp_path,
        row("nemotron_3_nano", "gb200", cuda_graph_modules="attn+mamba", **graphs),
        row("nemotron_3_nano", "gb200", release="26.04", **graphs),
        row("gpt_oss_20b", "gb200", dispatcher="alltoall", offload_layers="95"),
        row(
            "kimi_k2",
            "h100",
            dispatcher="alltoall",
            overlap_grad_reduce="False",
            overlap_param_gather="False",
        ),
        row(
            "deepseek_v3",
            "h100",
            dispatcher="alltoall",
            overlap_grad_reduce="False",
            overlap_param_gather="True",
        ),
        row(
            "llama3_70b",
            "gb200",
            "nvfp4",
            cuda_graph_impl="transformer_engine",
            cuda_graph_modules="full",
        ),
    )
    values = {
        (each.model, each.release): {
            key: value for group in each.settings.values() for key, value in group.items()
        }
        for each in listed
    }
    assert values["nemotron-3-nano-30b-a3b", "26.04"]["training.cuda_graph_modules"] == [
        "attn",
        "mamba",
    ], "as before"
    assert values["gpt-oss-20b", "26.02"]["training.offload"] is None, "more layers than it has"
    assert values["kimi-k2", "26.02"]["training.overlap"] == {"data_parallel": False}
    assert values["deepseek-v3", "26.02"]["training.overlap"] is None, (
        "one of the two still overlaps"
    )
    assert values["llama-3-70b", "26.02"]["training.cuda_graph_modules"] == ["attn", "mlp"]


def test_a_hybrid_speaks_for_no_other_model(tmp_path: Path) -> None:
    listed = table(
        tmp_path,
        row("nemotron_3_nano", "gb200", dispatcher="alltoall", cuda_graph_impl="local"),
        row("qwen3_30b_a3b", "gb200", dispatcher="flex_hybridep"),
    )
    (made,) = parse_recipes(render_recipes(release_rules(listed))).values()
    workload = TrainingWorkload(sequence_length=4096, global_batch_size=512)
    gpu, other = catalog.gpu("gb200-nvl72"), catalog.model("mixtral-8x7b")
    values = recipe_settings(made, model=other, gpu=gpu, num_gpus=64, workload=workload)
    assert values["parallel"]["moe_token_dispatcher_type"] == "flex" and not values["training"].get(
        "cuda_graphs"
    )


def test_sizes_that_are_not_listed_belong_to_the_nearest(tmp_path: Path) -> None:
    listed = table(
        tmp_path,
        row("llama3_70b", "gb200", fsdp="True"),
        row("llama3_70b", "gb200", gpus=256, gbs=2048),
    )
    (made,) = parse_recipes(render_recipes(release_rules(listed))).values()
    workload = TrainingWorkload(sequence_length=8192, global_batch_size=512)
    stages = {
        num_gpus: recipe_settings(
            made,
            model=catalog.model("llama-3-70b"),
            gpu=catalog.gpu("gb200-nvl72"),
            num_gpus=num_gpus,
            workload=workload,
        )["parallel"].get("zero_stage")
        for num_gpus in (64, 100, 150, 256)
    }
    assert stages == {64: 3, 100: 3, 150: None, 256: None}


def test_the_answer_says_what_stands_in() -> None:
    query = Query(
        kind="training",
        model="llama-3.3-70b",
        cluster=ClusterQuery(gpu="h200-sxm-141gb", num_gpus=64),
        training=TrainingWorkload(
            sequence_length=8192, global_batch_size=128, recipe="megatron-bridge"
        ),
        parallel=ParallelQuery(tensor_parallel_size=4, pipeline_parallel_size=4),
    )
    words = resolve_training(query).assumed["training.recipe"]
    assert words == (
        f"{get_recipe('megatron-bridge').name}; llama-3.3-70b is not listed: settings of "
        "llama-3-70b; h200-sxm-141gb is not listed: settings of h100-sxm-80gb"
    )


@pytest.fixture(scope="module")
def real() -> list[Preset]:
    return read_presets(folder_named())


def test_the_catalogue_s_recipes_are_the_releases_own(real: list[Preset]) -> None:
    text = CATALOGUE.read_text()
    assert text == render_recipes(release_rules(real)), "python -m benchmarks.recipes --write"
    result = score(real, text)
    assert result.compared.total() - result.equal.total() <= 2, (
        "of two scalings of fp8 a query of fp8 alone means one"
    )


def test_import_reads_presets_by_the_releases_own_layouts() -> None:
    assert LAYOUTS.read_text() == render_layouts(folder_named()), (
        "python -m benchmarks.recipes --write"
    )


def test_no_published_training_is_refused(real: list[Preset]) -> None:
    newest = get_recipe("megatron-bridge").name.removeprefix("megatron-bridge-")
    refused = []
    for preset in (each for each in real if each.release == newest and each.task == "pretrain"):
        mixture = preset.kind != "dense"
        query = Query(
            kind="training",
            model=preset.model,
            cluster=ClusterQuery(gpu=preset.gpu, num_gpus=preset.num_gpus),
            training=TrainingWorkload(
                sequence_length=4096,
                global_batch_size=preset.global_batch_size or 512,
                precision=preset.precision,
                recipe=f"megatron-bridge-{newest}",
            ),
            parallel=ParallelQuery(expert_parallel_size=8 if mixture else 1),
        )
        try:
            resolve_training(query)
        except HpToolError as error:
            refused.append(f"{preset.cell}: {error}")
    assert not refused, "\n".join(refused)


@pytest.mark.long
def test_rules_alone_know_most_of_a_model_s_knobs(real: list[Preset]) -> None:
    scores = score_unseen(real).values()
    right, of = (
        sum(part(each) for each in scores)
        for part in (lambda s: s.equal.total(), lambda s: s.compared.total())
    )
    assert right / of >= 0.85
