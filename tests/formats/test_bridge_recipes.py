"""Recipes and presets of Megatron Bridge by name: their layouts, overrides over them, and names
that nobody knows.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from hp_tool.errors import HpToolError, InputError
from hp_tool.formats.exchange import detect_format, read_configuration, read_query
from hp_tool.formats.reading import Reading
from hp_tool.formats.tools.nemo.recipes import _library_file, library_recipe, presets
from hp_tool.questions import schema, training

H100 = {"cluster.gpu": "h100-sxm-80gb"}
LIBRARY = (
    "torchrun --nnodes 8 --nproc_per_node=8 scripts/training/run_recipe.py "
    "--recipe {name} --dataset mock {words}\n"
)
LAUNCH = """#!/bin/bash
set -eu -o pipefail
FW_VERSION=26.04.01
IMAGE=${{RUN_CONF_IMAGE:-$FOLDER/images/nvidia+nemo+$FW_VERSION.sqsh}}
DTYPE=${{DTYPE:-fp8}}
MODEL_SIZE=${{MODEL_SIZE:-70b}}
CONFIG_OVERRIDES=""
if [[ -n ${{GBS-}} ]]; then
    CONFIG_OVERRIDES+="-gb $GBS "
fi
if [[ $DTYPE == "fp8" ]]; then
    CONFIG_OVERRIDES+=" --compute_dtype fp8_${{FP8_RECIPE:-cs}} "
else
    CONFIG_OVERRIDES+=" --compute_dtype $DTYPE "
fi
if [[ $MODEL_SIZE == 405b ]]; then NAME=llama31_405b; else NAME=llama3_$MODEL_SIZE; fi
pushd $FOLDER
python scripts/performance/setup_experiment.py \\
    --model_family_name llama \\
    --model_recipe_name $NAME \\
    --gpu ${{GPU_TYPE:?is required}} \\
    --container_image $IMAGE \\
    --num_gpus $JOB_TOTAL_GPUS \\
    --gpus_per_node 8 \\
    --offline \\
    $CONFIG_OVERRIDES \\
    --account $ACCOUNT --time_limit 00:30:00 {words}
popd
"""


def launched(words: str = "", **variables: str) -> Reading:
    given = {"GPU_TYPE": "h100", "JOB_TOTAL_GPUS": "64", **variables}
    return read_configuration(LAUNCH.format(words=words), variables=given)


def test_a_library_recipe_is_read_by_its_name() -> None:
    text = LIBRARY.format(name="llama3_70b_pretrain_config", words="")
    assert detect_format(text) == "nemo"
    query = read_query(text, overrides=H100)
    assert (query["model"], query["cluster"]["num_gpus"]) == ("llama-3-70b", 64)
    parallel, work = query["parallel"], query["training"]
    assert [parallel[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "context")] == [
        4,
        4,
        2,
    ]
    assert (parallel["virtual_pipeline_parallel_size"], parallel["zero_stage"]) == (5, 1)
    assert (work["global_batch_size"], work["sequence_length"]) == (512, 8192)
    assert (work["cross_entropy"], work["precision"]) == ("in_place", "bf16")
    assert training.estimate(query=schema.parse_query(query), with_fixes=False).feasible


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("model.tensor_model_parallel_size=8", "parallel.tensor_parallel_size", 8),
        ("train.global_batch_size=1024", "training.global_batch_size", 1024),
        ("-gb 256 -mb 2", "parallel.micro_batch_size", 2),
        ("-gb 256 train.global_batch_size=128", "training.global_batch_size", 128),
        ("--seq_length 4096", "training.sequence_length", 4096),
        ("model.recompute_granularity=full", "parallel.recompute", "full"),
        ("model.cross_entropy_loss_fusion=false", "training.cross_entropy", "unfused"),
        ("comm_overlap.tp_comm_overlap=false", "training.overlap", {"tensor_parallel": False}),
    ],
)
def test_overrides_are_laid_over_a_recipe(words: str, path: str, value: Any) -> None:
    query = read_query(
        LIBRARY.format(name="llama3_70b_pretrain_config", words=words), overrides=H100
    )
    section, _, name = path.partition(".")
    assert query[section][name] == value


@pytest.mark.parametrize(
    ("name", "words", "word"),
    [
        ("llama3_70b_pretran_config", "", "nearest are llama3_70b_pretrain_config"),
        ("llama3_70b_pretrain_config", "model.hidden_size=1", "changes the recipe's model"),
        (
            "llama3_70b_pretrain_config",
            "~model.cp_comm_type",
            "~model.cp_comm_type: deleting a key is not supported",
        ),
        ("llama3_70b_pretrain_config", "--deterministic", "--deterministic: changes"),
        ("llama3_70b_pretrain_config", "--of_my_own 1", "--of_my_own 1 is not known"),
        ("llama3_70b_pretrain_config", "model.tensor_model_parallel_size=$TP", "--var TP="),
    ],
)
def test_what_a_command_cannot_say_is_refused_by_name(name: str, words: str, word: str) -> None:
    with pytest.raises(InputError, match=re.escape(word)):
        read_query(LIBRARY.format(name=name, words=words), overrides=H100)


def test_a_recipe_for_adapters_says_their_rank() -> None:
    query = read_query(
        "torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b_peft_config\n", overrides=H100
    )
    assert query["training"]["task"] == "lora" and query["training"]["lora"]["rank"] == 8
    chosen = read_query(
        "torchrun --nproc_per_node=8 run_recipe.py --model llama3_8b --mode lora\n", overrides=H100
    )
    assert chosen == query


def test_the_function_of_a_preset_is_read_and_scaled() -> None:
    command = (
        "./scripts/training/train.sh --nodes {nodes} --gpus-per-node 8 --account A "
        "--recipe llama3_70b_pretrain_64gpu_h100_bf16_config {words}\n"
    )
    own, double = (read_query(command.format(nodes=nodes, words="")) for nodes in (8, 16))
    assert own["training"]["global_batch_size"] == 256
    assert double["training"]["global_batch_size"] == 512
    assert own["training"]["recipe"] == "megatron-bridge-26.08"
    assert own["cluster"] == {"gpu": "h100-sxm-80gb", "num_gpus": 64}
    assert "cross_entropy" not in own["training"], "the catalogue's recipe says it"
    off = read_query(command.format(nodes=8, words="model.cuda_graph_impl=none"))
    assert off["training"]["cuda_graphs"] is False


def test_a_benchmarks_launch_script_chooses_a_preset() -> None:
    reading = launched()
    work, parallel = reading.query["training"], reading.query["parallel"]
    assert (reading.query["model"], reading.num_gpus) == ("llama-3-70b", 64)
    assert work["recipe"] == "megatron-bridge-26.04.01"
    assert (work["precision"], work["fp8_recipe"], work["global_batch_size"]) == (
        "fp8",
        "tensorwise",
        256,
    )
    assert (parallel["tensor_parallel_size"], parallel["pipeline_parallel_size"]) == (4, 8)
    assert training.estimate(query=schema.parse_query(reading.query), with_fixes=False).feasible
    assert launched(DTYPE="bf16").query["parallel"]["context_parallel_size"] == 2
    assert launched("--config_variant v1").query["training"]["global_batch_size"] == 128
    assert launched(GBS="96").query["training"]["global_batch_size"] == 96
    assert launched(MODEL_SIZE="8b", JOB_TOTAL_GPUS="16").query["model"] == "llama-3-8b"


@pytest.mark.parametrize(
    ("words", "variables", "word"),
    [
        (
            "",
            {"FP8_RECIPE": "mx"},
            "llama3_70b has no preset for --compute_dtype fp8_mx; available: bf16",
        ),
        ("", {"GPU_TYPE": "l40s"}, "llama3_70b has no preset for --gpu l40s; available: "),
        ("", {"MODEL_SIZE": "71b"}, "nearest are llama3_70b"),
        ("", {"MODEL_SIZE": "405b"}, "--model_recipe_name llama31_405b is an unknown"),
        ("--config_variant v9", {}, "unknown --config_variant v9"),
        ("--task distill", {}, "--task"),
        ("--container_image my/image:1", {}, "add --set training.recipe=megatron-bridge-26.08"),
        ("--recompute_modules mlp", {}, "--recompute_modules: changes"),
    ],
)
def test_a_preset_that_is_not_known_is_refused_by_name(
    words: str, variables: dict[str, str], word: str
) -> None:
    with pytest.raises(HpToolError, match=re.escape(word)):
        launched(words, **variables)


def test_the_table_knows_the_recipes_of_each_model_and_every_alias() -> None:
    table = _library_file()
    assert len(table["recipes"]) >= 100 and len(presets()) >= 300
    assert all(library_recipe(name) is not None for name in table["aliases"])
    assert {"llama3_8b_sft_config", "qwen3_30b_a3b_pretrain_config"} <= set(table["aliases"])


def is_legal(text: str, **given: Any) -> bool:
    """Whether a command is read as a layout that its GPUs allow; memory aside."""
    try:
        query = read_query(text, overrides=given)
        estimate = training.estimate(query=schema.parse_query(query), with_fixes=False)
    except HpToolError as error:
        assert error.message
        return False
    return all(each.code == "memory" for each in estimate.reasons)


@pytest.mark.components
def test_recipes_of_the_table_are_legal_on_the_gpus_of_their_names() -> None:
    """All but those for an arithmetic that their GPU does not have, or adapters that are not
    modelled.
    """
    wrong = []
    for name in _library_file()["recipes"]:
        count = re.search(r"_(\d+)gpu_", name)
        assert count is not None, name
        gpu = "gb200-nvl72" if "_gb200_" in name else "h100-sxm-80gb"
        text = f"torchrun --nproc_per_node={count[1]} run_recipe.py --recipe {name}\n"
        if not is_legal(text, **{"cluster.gpu": gpu}):
            wrong.append(name)
    assert all(
        re.search("h100_(fp8mx|nvfp4)|_peft_.*(fp8|nemotron)|nano_peft", name) for name in wrong
    )
    assert len(wrong) < 8


@pytest.mark.components
def test_presets_of_the_table_are_legal_on_their_gpus() -> None:
    wrong = []
    for preset in presets():
        task = {"lora": "peft"}.get(preset.task, preset.task)
        text = (
            f"python setup_experiment.py -m x -mr {preset.recipe} -g {preset.chip} --task {task} "
            f"-c {preset.precision} -ng {preset.num_gpus} "
            f"-i nvcr.io/nvidia/nemo:{preset.releases[-1]} "
            f"{f'-cv {preset.variant}' if preset.variant else ''}\n"
        )
        given: dict[str, Any] = {"training.sequence_length": 4096}
        if preset.task == "lora":
            given["training.lora.rank"] = 16
        if not is_legal(text, **given):
            wrong.append((preset.recipe, preset.chip, preset.precision))
    assert set(wrong) <= {
        ("gpt_oss_120b", "h100", "fp8_mx"),
        ("deepseek_v3", "h100", "bf16"),
        ("deepseek_v3", "h100", "fp8_cs"),
    }
    assert len(wrong) <= 4
