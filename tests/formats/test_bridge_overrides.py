"""Overrides of a recipe of Megatron Bridge, as they are exported: read back with the model, and
refused by name for what they leave to the recipe.
"""

from __future__ import annotations

from typing import Any

import pytest

import hp_tool
from hp_tool.errors import InputError
from hp_tool.formats.exchange import detect_format, read_query
from hp_tool.formats.reading import ImportRefusedError

GIVEN = {"cluster.gpu": "h100-sxm-80gb", "cluster.num_gpus": 64}
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
    "parallel": {"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "micro_batch_size": 1},
}


def text() -> str:
    return hp_tool.export(QUERY, format="nemo").text


def read(words: str, **given: Any) -> dict[str, Any]:
    return read_query(words, overrides=GIVEN | {"model": "llama-3-70b"} | given)


def test_overrides_alone_are_bridges() -> None:
    assert detect_format(text()) == "nemo"
    back = read(text())
    assert back["model"] == "llama-3-70b"
    assert (back["parallel"]["tensor_parallel_size"], back["training"]["global_batch_size"]) == (
        4,
        128,
    )


def test_a_recipe_that_nobody_names_leaves_its_model_open() -> None:
    with pytest.raises(ImportRefusedError, match="name it; add --model llama-3-70b") as caught:
        read_query(text(), overrides=GIVEN)
    assert [each.field for each in caught.value.reading.missing] == ["model"]


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("model.pipeline_model_parallel_size", "parallel.pipeline_parallel_size"),
        ("train.global_batch_size", "training.global_batch_size"),
        ("mixed_precision", "training.precision"),
    ],
)
def test_a_size_that_is_left_to_the_recipe_is_missing(key: str, field: str) -> None:
    fewer = "".join(line for line in text().splitlines(True) if not line.startswith(f"{key}="))
    with pytest.raises(ImportRefusedError) as caught:
        read(fewer)
    assert field in {each.field for each in caught.value.reading.missing}
    assert f"{key} comes from the recipe" in caught.value.message


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("~model.cp_comm_type", r"\~model\.cp_comm_type: deleting a key is not supported"),
        ("model.hidden_size=4096", r"model\.hidden_size 4096 changes the recipe's model"),
        ("model.num_layers=4", r"model\.num_layers 4 changes the recipe's model"),
        ("model.of_my_own=1", "model.of_my_own is not known"),
    ],
)
def test_what_changes_the_recipe_is_refused_by_name(line: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        read(f"{text()}{line}\n")


def test_the_recipes_own_number_of_layers_changes_nothing() -> None:
    assert read(f"{text()}model.num_layers=80\n") == read(text())


def test_mappings_are_read_as_hydra_writes_them() -> None:
    narrow = QUERY | {"training": QUERY["training"] | {"gradient_precision": "bf16"}}
    assert read(hp_tool.export(narrow, format="nemo").text)["training"]["gradient_precision"] == (
        "bf16"
    )


def test_a_file_without_a_shape_contains_overrides() -> None:
    text = "model: {seq_length: 2048}\ntrain: {global_batch_size: 64, micro_batch_size: 1}\n"
    with pytest.raises(InputError, match="the recipe defines the model"):
        read_query(text, num_gpus=8, overrides={"cluster.gpu": "h100-sxm-80gb"}, format="nemo")
