"""In how many bits a LoRA's frozen base is counted, and whether the suggested change is one that
saves what it states.
"""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.domain.result import Estimate
from hp_tool.errors import UnsupportedError
from hp_tool.formats.exchange import read_query
from hp_tool.formats.exchange.export import export
from hp_tool.questions import schema
from hp_tool.questions.training import estimate

TARGETS = ["q_proj", "v_proj"]
SCRIPT = (
    "python -m trl.scripts.sft --model_name_or_path meta-llama/Meta-Llama-3-8B --use_peft --lora_r "
    "16 --bf16"
    " --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --max_length 4096"
)


def query(framework: str, **training: Any) -> dict[str, Any]:
    work = {
        "task": "lora",
        "lora": {"rank": 16, "target_modules": TARGETS},
        "framework": framework,
        "sequence_length": 2048,
        "global_batch_size": 4,
        **training,
    }
    return {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "rtx-4090-24gb", "num_gpus": 1},
        "training": work,
        "parallel": {"micro_batch_size": 1, "recompute": "full", "zero_stage": 3},
    }


def asked(framework: str, **training: Any) -> Estimate:
    return estimate(query=schema.parse_query(query(framework, **training)))


@pytest.mark.parametrize(
    "framework", ["torch-fsdp", "litgpt", "verl-fsdp", "megatron-core", "hf-trainer"]
)
def test_a_frozen_base_is_loaded_in_the_16_bits_that_it_is_computed_in(framework: str) -> None:
    answer = asked(framework)
    assert answer.memory is not None
    assert answer.memory.weights_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    assert answer.feasible


@pytest.mark.parametrize(
    "training", [{"parameter_precision": "fp32"}, {"recipe": "trl-1.7"}, {"recipe": "trl-1.6"}]
)
def test_a_base_of_32_bits_is_said_and_the_first_change_mends_it(training: dict[str, Any]) -> None:
    answer = asked("torch-fsdp", **training)
    assert answer.memory is not None
    assert answer.memory.weights_bytes == pytest.approx(4 * 8.03e9, rel=0.01)
    assert not answer.feasible
    first = answer.fixes[0]
    assert first.change == "parameter_precision fp32 -> bf16"
    mended = (
        asked("torch-fsdp", **training, parameter_precision="bf16")
        if "recipe" in training
        else asked("torch-fsdp")
    )
    assert mended.feasible and mended.memory is not None
    assert first.memory_total_bytes == pytest.approx(mended.memory.total_bytes, rel=1e-9)


def test_a_base_of_16_bits_is_offered_8_and_4() -> None:
    answer = asked("torch-fsdp", sequence_length=8192)
    changes = [fix.change for fix in answer.fixes]
    assert not answer.feasible and any(
        change.startswith("frozen_precision bf16 -> ") for change in changes
    )


@pytest.mark.parametrize(
    ("training", "dtype"), [({}, "bfloat16"), ({"parameter_precision": "fp32"}, "float32")]
)
def test_trl_is_told_what_was_counted_and_reads_it_back(
    training: dict[str, Any], dtype: str
) -> None:
    one = query("hf-trainer", cross_entropy="chunked", **training)
    one["cluster"] = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
    one["training"]["global_batch_size"] = 8
    text = export(result=one, format="trl")
    assert f"--dtype {dtype}" in text
    read = read_query(text, overrides={"cluster.gpu": "h100-sxm-80gb"})
    assert read["training"].get("parameter_precision") == training.get("parameter_precision")


@pytest.mark.parametrize(
    ("options", "stored"), [("", "fp32"), (" --dtype float32", "fp32"), (" --dtype bfloat16", None)]
)
def test_trl_loads_the_base_in_32_bits_unless_it_is_told_otherwise(
    options: str, stored: str | None
) -> None:
    read = read_query(
        SCRIPT + options, overrides={"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8}}
    )
    assert read["training"].get("parameter_precision") == stored


@pytest.mark.parametrize("framework", ["hf-trainer", "torch-fsdp", "llama-factory"])
def test_a_precision_that_the_framework_does_not_store_is_refused(framework: str) -> None:
    asked = schema.parse_query(query(framework, frozen_precision="fp8"))
    with pytest.raises(UnsupportedError, match="use bf16 or nf4"):
        estimate(query=asked)
