"""A config.json of an unknown model_type is read by its fields, if its size is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_tool import catalog
from hp_tool.catalog.library import stored_precision
from hp_tool.catalog.models import published_precision
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.query import OwnFile
from hp_tool.errors import UnsupportedError

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
COUNT = total_parameters(catalog.model_from_mapping({"model_type": "llama", **SHAPE}))
NEW = {"model_type": "brand_new", "num_parameters": int(COUNT), **SHAPE}


def test_the_reader_that_counts_the_same_is_taken_and_named() -> None:
    spec = catalog.model_from_mapping(NEW)
    assert total_parameters(spec) == COUNT
    assert spec.left_out is not None and "read by structure, as llama" in spec.left_out


@pytest.mark.parametrize("changes", [{"num_parameters": None}, {"num_parameters": int(COUNT) + 1}])
def test_without_a_matching_size_it_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="brand_new"):
        catalog.model_from_mapping({**NEW, **changes})


def test_a_key_that_nobody_understands_refuses_it_by_name() -> None:
    with pytest.raises(UnsupportedError, match="gate_every_layer"):
        catalog.model_from_mapping({**NEW, "gate_every_layer": True})


def test_a_window_is_read_and_not_dropped() -> None:
    spec = catalog.model_from_mapping({**NEW, "sliding_window": 128})
    assert spec.sliding_window == 128


def test_the_index_of_the_checkpoints_files_states_the_size(tmp_path: Path) -> None:
    config = {key: value for key, value in NEW.items() if key != "num_parameters"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    with pytest.raises(UnsupportedError, match="brand_new"):
        catalog.model(OwnFile(str(tmp_path / "config.json")))
    index = {"metadata": {"total_size": int(COUNT) * 2}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert catalog.model(OwnFile(str(tmp_path / "config.json"))).num_hidden_layers == 4


@pytest.mark.parametrize(
    ("name", "model", "precision"),
    [
        ("NousResearch/Meta-Llama-3-8B", "llama-3-8b", "bf16"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "fp8"),
        ("RedHatAI/Meta-Llama-3.1-8B-quantized.w8a8", "llama-3.1-8b", "int8"),
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "qwen3.5-397b-a17b", "nvfp4"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2", "int4"),
        ("zai-org/GLM-5.2", "glm-5.2-fp8", "bf16"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b", "bf16"),
    ],
)
def test_published_checkpoints_are_known_with_their_precision(
    name: str, model: str, precision: str
) -> None:
    assert catalog.model(name).name == model
    assert published_precision(name) == precision


@pytest.mark.parametrize("name", ["mistralai/Mistral-7B-v0.4", "Qwen/Qwen2.5-Omni-7B"])
def test_another_shape_is_not_taken_for_its_kin(name: str) -> None:
    assert not catalog.has_entry("models", name)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("Llama-3.1-8B", None), ("Qwen2.5-7B-GPTQ-Int8", "int8"), ("Qwen2.5-7B-GPTQ", "int4")],
)
def test_a_name_states_the_precision_of_its_format(name: str, precision: str | None) -> None:
    assert stored_precision(f"owner/{name}") == precision
