"""ms-swift's commands: what they leave out takes its defaults, and what is not modelled is refused
by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_tool.domain.pipeline_layout import parse_layout
from hp_tool.errors import InputError
from hp_tool.formats.exchange import read_query
from hp_tool.formats.reading import hyphenated, table

H100 = {"cluster.gpu": "h100-sxm-80gb"}
LORA = "NPROC_PER_NODE=4 NNODES=2 swift sft --model Qwen/Qwen3-8B --dataset d --max_length 4096"
FULL = "export NPROC_PER_NODE=8\nswift pt --model Qwen/Qwen3-8B --train_type full --max_length 4096"
MEGATRON = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --dataset d --max_length 4096"


RECORDED: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("fine_tuning_keys.json").read_text()
)
OLDER = {
    "ms-swift": {
        "train-type",
        "load-safetensors",
        "use-tiled-mlp",
        "tiled-mlp-num-shards",
        "activation-cpu-offload",
    },
    "axolotl": {"fsdp", "model-type", "model-config", "debug"},
}
"""Names of earlier releases, and axolotl's aliases."""


@pytest.mark.parametrize("tool", OLDER)
def test_each_word_of_a_table_is_one_that_the_tool_knows(tool: str) -> None:
    beside = (
        [*RECORDED["llama-factory"], *table("megatron")] if tool == "ms-swift" else []
    )  # the Trainer's, and Megatron's
    known = {hyphenated(key) for key in (*RECORDED[tool], *beside)} | OLDER[tool]
    words = (name.partition(".")[0] for name in table(tool) if not name.endswith("*"))
    assert [name for name in words if name not in known] == []


def query(command: str, **more: Any) -> dict[str, Any]:
    return read_query(command, overrides=H100, **more)


def test_what_a_command_leaves_out_is_as_ms_swift_has_it() -> None:
    read = query(LORA)
    assert read["cluster"]["num_gpus"] == 8 and read["parallel"]["recompute"] == "full"
    assert (
        read["training"]["lora"] == {"rank": 8, "dropout": 0.05}
        and read["training"]["precision"] == "bf16"
    )
    assert read["training"]["global_batch_size"] == 16  # to which gradients are accumulated
    assert query(f"{LORA} --per_device_train_batch_size 4")["training"]["global_batch_size"] == 32


@pytest.mark.parametrize(
    ("preset", "stage", "offload"),
    [("zero1", 1, None), ("zero3", 3, None), ("zero2_offload", 2, "optimizer")],
)
def test_its_own_files_of_deepspeed_are_known_by_name(
    preset: str, stage: int, offload: str | None
) -> None:
    read = query(f"{FULL} --deepspeed {preset} --gradient_accumulation_steps 2")
    assert (read["parallel"]["zero_stage"], read["training"].get("offload")) == (stage, offload)
    assert read["training"]["global_batch_size"] == 16 and "lora" not in read["training"]


def test_four_bits_are_nf4_with_quantised_scales() -> None:
    assert (
        query(f"{LORA} --quant_bits 4 --quant_method bnb")["training"]["frozen_precision"] == "nf4"
    )


def test_megatron_takes_its_arguments_with_the_defaults_of_ms_swift() -> None:
    read = query(
        f"{MEGATRON} --tensor_model_parallel_size 2 --sequence_parallel true --overlap_grad_reduce "
        "false"
    )
    assert read["model"] == "Qwen/Qwen3-8B"
    training = {
        "global_batch_size": 16,
        "precision": "bf16",
        "dropout": 0.0,
        "sequence_length": 4096,
        "cross_entropy": "fused",
    }
    assert {key: read["training"][key] for key in training} == training
    parallel = {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "recompute": "selective",
        "zero_stage": 1,
    }
    assert {key: read["parallel"][key] for key in parallel} == parallel
    adapted = query(f"{MEGATRON} --tuner_type lora --lora_rank 16 --target_modules linear_qkv")[
        "training"
    ]
    assert adapted["lora"] == {"rank": 16, "dropout": 0.05, "target_modules": ["linear_qkv"]}
    plain = query(
        f"{MEGATRON} --recompute_granularity none --virtual_pipeline_model_parallel_size 2 "
        "--pipeline_model_parallel_size 2"
    )
    assert (
        plain["parallel"]["recompute"],
        plain["parallel"]["virtual_pipeline_parallel_size"],
    ) == ("none", 2)


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (f"{FULL} --deepspeed zero3_offload", "offload_param"),
        (f"{LORA} --sequence_parallel_size 4", "sequence_parallel_size"),
        (f"{LORA} --tuner_type adalora", "adalora"),
        (f"{FULL} --deepspeed zero2 --optim adamw_8bit", "adamw_8bit"),
        (f"{LORA} --of_my_own 1", "of_my_own"),
        (LORA.replace("swift sft", "swift rlhf"), "rlhf"),
        (f"{MEGATRON} --tuner_type longlora", "longlora"),
        (LORA.removeprefix("NPROC_PER_NODE=4 NNODES=2 "), "NPROC_PER_NODE"),
        (f"{LORA} --deepspeed ds.json", "ds.json: file not found"),
    ],
)
def test_what_is_not_modelled_is_named(command: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        query(command)


def test_full_training_without_deepspeed_keeps_all_in_16_bits() -> None:
    training = query(f"{FULL} --torch_dtype bfloat16")["training"]
    widths = ("parameter_precision", "gradient_precision", "optimizer_precision")
    assert [training[name] for name in widths] == ["bf16"] * 3
    assert training["master_precision"] == "none"


def test_several_data_sets_follow_one_flag() -> None:
    for command in (LORA, MEGATRON):
        assert query(command.replace("--dataset d", "--dataset a/b#10 c/d#10"))["model"]


def test_a_backslash_before_the_end_ends_the_command() -> None:
    assert query(f"{LORA} \\\n") == query(f"{LORA} \\\n\n") == query(LORA)


FSDP_FILE = (
    '{"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16", '
    '"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": true, '
    '"fsdp_activation_checkpointing": true}}'
)
SWIFT_FSDP = (
    '{"_note": "words", "fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, '
    '"reshard_after_forward": false, "activation_checkpointing": false}}'
)


@pytest.mark.parametrize(
    ("start", "files", "gpus", "stage", "recompute"),
    [
        (
            "torchrun --nproc_per_node 4 --nnodes 2 swift/cli/sft.py --deepspeed zero2",
            {},
            8,
            2,
            "full",
        ),
        (
            "accelerate launch --config_file ./run/fsdp.json swift/cli/sft.py "
            "--gradient_checkpointing false",
            {"./run/fsdp.json": FSDP_FILE},
            4,
            3,
            "full",
        ),
        (
            "NPROC_PER_NODE=4 swift sft --fsdp fsdp2 --gradient_checkpointing false",
            {},
            4,
            3,
            "full",
        ),
        (
            "NPROC_PER_NODE=4 swift sft --fsdp run/fsdp2.json --gradient_checkpointing false",
            {"run/fsdp2.json": SWIFT_FSDP},
            4,
            2,
            "none",
        ),
    ],
)
def test_a_launcher_of_its_own_and_fsdp_are_read(
    start: str, files: dict[str, str], gpus: int, stage: int, recompute: str
) -> None:
    command = (
        f"{start} --model Qwen/Qwen2.5-7B-Instruct --tuner_type full --dataset d --max_length 2048 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --torch_dtype bfloat16\n"
    )
    read = read_query(command, files=files, overrides=H100)
    assert read["cluster"]["num_gpus"] == gpus
    assert read["training"]["framework"] == "hf-trainer" or (stage == 2 and "deepspeed" in start)
    assert read["training"]["global_batch_size"] == 2 * gpus
    assert read["parallel"]["zero_stage"] == stage
    assert read["parallel"]["recompute"] == recompute


def test_a_file_of_arguments_comes_before_those_of_the_command() -> None:
    file = (
        "model: Qwen/Qwen2.5-7B-Instruct\ntuner_type: lora\ndataset:\n  - 'a/b#500'\n"
        "max_length: 1024\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n"
    )
    file += "ENV:\n  NPROC_PER_NODE: 2\n  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True\n"
    command = "swift sft run/sft.yaml --max_length 2048\n"
    read = read_query(command, files={"run/sft.yaml": file}, overrides=H100)
    assert read["training"]["sequence_length"] == 2048
    assert read["parallel"]["micro_batch_size"] == 2
    assert read["training"]["global_batch_size"] == 32
    with pytest.raises(InputError, match=r"run/sft\.yaml: file not found"):
        read_query(command, overrides=H100)


@pytest.mark.parametrize("task", ["export --quant_bits 4", "deploy --infer_backend vllm", "infer"])
def test_other_commands_are_refused_by_their_kind(task: str) -> None:
    with pytest.raises(InputError, match="command of ms-swift that does not train"):
        read_query(f"swift {task} --model Qwen/Qwen3-8B --max_new_tokens 8 --seed 1\n")


def test_activations_on_the_host_are_refused() -> None:
    file = SWIFT_FSDP.replace('"activation_checkpointing": false', '"activation_cpu_offload": true')
    command = LORA.replace("swift sft", "swift sft --fsdp f.json")
    with pytest.raises(InputError, match="activation_cpu_offload"):
        read_query(command, files={"f.json": file}, overrides=H100)


def test_uneven_stages_are_laid_out_by_the_models_layers() -> None:
    read = query(
        "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --dataset d --max_length 8192 "
        "--pipeline_model_parallel_size 2 --decoder_first_pipeline_num_layers 25 "
        "--expert_model_parallel_size 4"
    )
    layout = parse_layout(read["parallel"]["pipeline_layout"])
    assert [chunk.layers for chunk in layout.chunks] == [25, 23]


def test_accumulation_by_expr_is_calculated() -> None:
    command = f"n=4\n{LORA} --gradient_accumulation_steps $(expr 32 / $n / 2)"
    assert query(command)["training"]["global_batch_size"] == 4 * 8
