"""LoRA in the words of TRL, axolotl, LLaMA-Factory and Megatron Bridge: each key is one of the
tool's, and what is read comes back the same.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import hp_tool
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import read_query
from hp_tool.formats.reading import hyphenated, look_up, table
from tests.formats.test_exported_words import exported, imported, run

KEYS = json.loads(Path(__file__).with_name("fine_tuning_keys.json").read_text())
LOSS = {"trl": "chunked"}


def query(
    format: str, *, lora: dict[str, Any] | None = None, frozen: str | None = "nf4", **parallel: Any
) -> dict[str, Any]:
    training: dict[str, Any] = {
        "framework": "hf-trainer",
        "sequence_length": 4096,
        "global_batch_size": 64,
        "task": "lora",
        "lora": lora or {"rank": 16, "dropout": 0.05},
        "cross_entropy": LOSS.get(format),
    }
    training |= {"frozen_precision": frozen} if frozen else {}
    sizes = {
        "tensor_parallel_size": 1,
        "zero_stage": 3,
        "recompute": "full",
        "micro_batch_size": 2,
    } | parallel
    return {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "training": {key: value for key, value in training.items() if value is not None},
        "parallel": sizes,
    }


def settings(text: str, format: str) -> dict[str, Any]:
    """What the tool is told, by key; of a script, its own file or its program's options."""
    if format == "axolotl":
        return dict(yaml.safe_load(text))
    if format == "llama-factory":
        found = re.search(r"cat > sft.yaml <<'END'\n(.*?)\nEND\n", text, re.DOTALL)
        assert found is not None
        return dict(yaml.safe_load(found[1]))
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    words = words[words.index("trl.scripts.sft") + 1 :]
    values: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            values[word[2:]] = []
        elif values:
            values[[*values][-1]].append(word)
    return values


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("frozen", [None, "nf4"])
@pytest.mark.parametrize("format", ["trl", "axolotl", "llama-factory"])
def test_every_key_is_one_that_the_tool_knows(
    format: str, frozen: str | None, recompute: str
) -> None:
    asked = query(format, frozen=frozen, recompute=recompute, micro_batch_size=1)
    said = settings(hp_tool.export(asked, format=format).text, format)
    assert not said.keys() - set(KEYS[format])
    rank = {"trl": ["16"]}.get(format, 16)
    assert rank in (said.get("lora_r"), said.get("lora_rank"))
    assert {
        "load_in_4bit": said.get("load_in_4bit") in ([], True),
        "quantization_bit": said.get("quantization_bit") == 4,
    }["quantization_bit" if format == "llama-factory" else "load_in_4bit"] == (frozen == "nf4")
    names = said.get("lora_target_modules") or said["lora_target"].split(",")
    assert [name for name in names if name.endswith("_proj")] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]


@pytest.mark.parametrize(("frozen", "once"), [(None, True), ("nf4", False)])
@pytest.mark.parametrize("format", ["trl", "axolotl", "llama-factory"])
def test_four_bits_are_quantised_on_every_rank(format: str, frozen: str | None, once: bool) -> None:
    """axolotl's configuration refuses FSDP 2 that quantises on the first rank alone, as the others
    would wait for it.
    """
    text = hp_tool.export(query(format, frozen=frozen), format=format).text
    assert f"cpu_ram_efficient_loading: {str(once).lower()}\n" in text


@pytest.mark.parametrize(
    ("lora", "frozen"),
    [
        ({"rank": 8}, "nf4"),
        ({"rank": 64, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}, None),
    ],
)
@pytest.mark.parametrize("format", ["trl", "axolotl"])
def test_what_is_read_comes_back_to_the_same_prediction(
    format: str, lora: dict[str, Any], frozen: str | None
) -> None:
    asked = query(format, lora=lora, frozen=frozen, data_parallel_shard_size=8)
    read = imported(exported(asked, format), "--gpu", "h100-sxm-80gb")
    one, other = (
        json.loads(run("estimate", "-", "--json", content=each).stdout)["estimate"]
        for each in (asked, read)
    )
    assert one["time"]["step_s"] == pytest.approx(other["time"]["step_s"], rel=1e-9)
    assert one["memory"]["total_bytes"] == pytest.approx(other["memory"]["total_bytes"], rel=1e-9)


def test_bridge_gets_the_adapters_of_a_recipe_for_peft_and_its_file_says_them() -> None:
    asked = {
        "kind": "training",
        "model": "llama-3-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "training": {
            "sequence_length": 4096,
            "global_batch_size": 32,
            "task": "lora",
            "lora": {"rank": 8, "dropout": 0.1, "target_modules": ["linear_qkv", "o_proj"]},
        },
        "parallel": {"tensor_parallel_size": 8},
    }
    words = shlex.split(exported(asked, "nemo"), comments=True)
    assert {
        "peft.dim=8",
        "peft.dropout=0.1",
        "peft.target_modules=[linear_qkv,linear_proj]",
    } <= set(words)
    asked["training"]["lora"]["target_modules"] = ["q_proj"]  # type: ignore[index]
    with pytest.raises(UnsupportedError, match=r"training\.lora\.target_modules"):
        hp_tool.export(asked, format="nemo")
    model = {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "ffn_hidden_size": 14336,
        "vocab_size": 128256,
        "num_query_groups": 8,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "seq_length": 4096,
    }
    file = {
        "model": model,
        "train": {"micro_batch_size": 1, "global_batch_size": 32},
        "peft": {
            "_target_": "megatron.bridge.peft.lora.LoRA",
            "dim": 8,
            "alpha": 16,
            "dropout": 0.1,
            "target_modules": ["linear_qkv", "linear_proj"],
        },
    }
    read = read_query(yaml.safe_dump(file), num_gpus=8, overrides={"cluster.gpu": "h100-sxm-80gb"})
    assert read["training"]["task"] == "lora"
    assert read["training"]["lora"] == {
        "rank": 8,
        "dropout": 0.1,
        "target_modules": ["linear_qkv", "linear_proj"],
    }


@pytest.mark.parametrize("format", ["trl", "axolotl", "llama-factory"])
def test_what_the_tool_would_run_otherwise_is_refused_by_name(format: str) -> None:
    for change, field in (
        (
            {"training": {"lora": {"rank": 8, "target_modules": ["linear_qkv"]}}},
            "training.lora.target_modules",
        ),
        ({"training": {"frozen_precision": "fp8"}}, "training.frozen_precision"),
        ({"training": {"cross_entropy": "fused"}}, "training.cross_entropy"),
        ({"parallel": {"tensor_parallel_size": 2}}, "parallel.tensor_parallel_size"),
        ({"model": "mixtral-8x7b", "parallel": {"expert_parallel_size": 1}}, "training.lora"),
    ):
        asked = query(format)
        for section, values in change.items():
            asked[section] = asked[section] | values if isinstance(values, dict) else values
        with pytest.raises((UnsupportedError, InputError)) as refused:
            hp_tool.export(asked, format=format)
        assert refused.value.field == field


def test_trl_says_what_it_leaves_out_by_its_defaults() -> None:
    script = (
        "accelerate launch --config_file a.yaml -m trl.scripts.sft --model_name_or_path "
        "meta-llama/Meta-Llama-3-8B"
        " --use_peft --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --max_length "
        "4096"
    )
    files = {
        "a.yaml": "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 1\nmixed_precision: "
        "bf16\n"
    }
    training = read_query(script, files=files, overrides={"cluster.gpu": "h100-sxm-80gb"})[
        "training"
    ]
    assert training["lora"] == {"rank": 16, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("format", ["trl", "axolotl", "llama-factory"])
def test_a_query_of_another_framework_is_ranked_again_for_the_tool(format: str) -> None:
    asked = query(format, frozen=None) | {"parallel": {}}
    asked["training"] |= {"framework": "megatron-core", "cross_entropy": None}
    chosen = hp_tool.export(asked, format=format, rerank=True)
    assert chosen.framework == "hf-trainer" and chosen.parallel["tensor_parallel_size"] == 1
    assert not settings(chosen.text, format).keys() - set(KEYS[format])


TRL = (
    " --model_name_or_path meta-llama/Meta-Llama-3-8B --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 4"
)


def test_trls_own_script_checkpoints_in_bf16_and_computes_the_loss_in_chunks_by_default() -> None:
    script = f"torchrun --nproc-per-node 8 -m trl.scripts.sft{TRL}"
    query = read_query(script, overrides={"cluster.gpu": "h100-sxm-80gb"})
    usual = {"sequence_length": 1024, "precision": "bf16", "cross_entropy": "chunked"}
    assert {key: query["training"].get(key) for key in usual} == usual
    assert query["parallel"]["recompute"] == "full"
    other = " --max_length 512 --activation_checkpointing false --fp16 true --loss_type nll"
    query = read_query(f"{script}{other}", overrides={"cluster.gpu": "h100-sxm-80gb"})
    said = {"sequence_length": 512, "precision": "fp16", "cross_entropy": "chunked"}
    assert {key: query["training"].get(key) for key in said} == said
    assert query["parallel"]["recompute"] == "none"


def test_a_script_of_ones_own_has_the_trainers_defaults() -> None:
    query = read_query(
        f"torchrun --nproc-per-node 8 sft.py{TRL} --max_length 512",
        overrides={"cluster.gpu": "h100-sxm-80gb"},
    )
    assert (query["training"]["precision"], query["parallel"]["recompute"]) == ("fp32", "none")
    assert "cross_entropy" not in query["training"]


def test_every_key_of_trl_has_its_line() -> None:
    arguments = table("trainer")
    assert [name for name in KEYS["trl"] if look_up(hyphenated(name), arguments) is None] == []
