"""A serving query that names no precision is answered for the published checkpoint's, in every
command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hp_tool
from hp_tool.catalog import library, model
from hp_tool.errors import HpToolError, UnsupportedError
from hp_tool.formats.exchange import read_query
from hp_tool.questions import schema
from hp_tool.questions.serving.problem import resolve_serving
from tests.command_line import hp_tool as command_line

LOAD = {
    "inference.input_length": 1000,
    "inference.output_length": 100,
    "inference.concurrency": 16,
    "cluster.gpu": "h200",
}
PUBLISHED = {
    "deepseek-v3": "fp8",
    "deepseek-r1": "fp8",
    "deepseek-ai/DeepSeek-R1-0528": "fp8",
    "deepseek-r1-0528": "fp8",
    "deepseek-ai/DeepSeek-V3-0324": "fp8",
    "deepseek-ai/DeepSeek-V3.2": "fp8",
    "kimi-k2": "fp8",
    "MiniMaxAI/MiniMax-M2.5": "fp8",
    "gpt-oss-120b": "mxfp4",
    "openai/gpt-oss-20b": "mxfp4",
    "Qwen/Qwen3-32B-FP8": "fp8",
    "qwen3-32b": "bf16",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "bf16",
    "meta-llama/Llama-3.1-8B-Instruct": "bf16",
}


def served(model: Any, **inference: Any) -> dict[str, Any]:
    load = {"input_length": 1000, "output_length": 100, "concurrency": 16}
    return {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": "h200", "num_gpus": 16},
        "inference": load | inference,
    }


@pytest.mark.parametrize(("name", "precision"), PUBLISHED.items())
def test_recommend_import_and_export_agree(name: str, precision: str) -> None:
    best = hp_tool.recommend(served(name), top=1).recommendations
    assert best, f"{name}: nothing fits"
    assert best[0].estimate.provenance["precision"] == precision
    stated = hp_tool.recommend(served(name, precision=precision), top=1).recommendations
    assert best[0].estimate.ttft_s == stated[0].estimate.ttft_s
    script = hp_tool.export(served(name), format="vllm").text
    again = schema.parse_query(read_query(script, overrides=LOAD | {"cluster.num_gpus": 8}))
    assert resolve_serving(again).precision == precision
    read = schema.parse_query(read_query(f"vllm serve {name} -tp 8", overrides=LOAD))
    assert resolve_serving(read).precision == precision


def test_every_model_of_the_catalogue_is_exported_as_it_was_answered() -> None:
    exported = 0
    for name in library.names("models"):
        if model(name).architecture != "decoder":
            continue
        try:
            text = hp_tool.export(
                served(name) | {"parallel": {"tensor_parallel_size": 1}}, format="vllm"
            ).text
        except HpToolError as error:
            assert getattr(error, "field", "") != "inference.precision", f"{name}: {error}"
            continue
        exported += "vllm serve" in text
    assert exported > 20


def test_a_config_json_says_how_its_weights_are_stored(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    compressed = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
    }
    by_hand: list[tuple[dict[str, Any], str]] = [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        (compressed, "fp8"),
        ({}, "bf16"),
    ]
    for stored, precision in by_hand:
        written = config | ({"quantization_config": stored} if stored else {})
        assert resolve_serving(schema.parse_query(served(written))).precision == precision
        (tmp_path / "config.json").write_text(json.dumps(written))
        assert (
            resolve_serving(schema.parse_own_query(served(str(tmp_path / "config.json")))).precision
            == precision
        )
    unknown = config | {"quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(UnsupportedError) as error:
        resolve_serving(schema.parse_query(served(unknown)))
    assert error.value.field == "inference.precision"
    assert (
        resolve_serving(schema.parse_query(served(unknown, precision="int4"))).precision == "int4"
    )


def test_a_table_says_which_precision_was_taken() -> None:
    run = command_line("recommend", "-", "--top", "1", stdin=json.dumps(served("deepseek-v3")))
    assert run.returncode == 0 and "Weights in fp8, as published" in run.stdout, run.stdout
