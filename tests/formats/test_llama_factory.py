"""LLaMA-Factory's YAML file, as its examples have it."""

from __future__ import annotations

import pytest

from hp_tool.errors import InputError
from hp_tool.formats.exchange import read_query

H100 = {"cluster.gpu": "h100-sxm-80gb"}
LORA = """
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
### dataset
dataset: identity,alpaca_en_demo
template: llama3
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
ZERO = (
    '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, '
    '"train_micro_batch_size_per_gpu": "auto",'
    ' "gradient_accumulation_steps": "auto"}'
)


def test_lora_with_its_defaults() -> None:
    query = read_query(LORA, num_gpus=8, overrides=H100)
    assert query["model"] == "meta-llama/Meta-Llama-3-8B-Instruct"
    training = {
        "task": "lora",
        "precision": "bf16",
        "sequence_length": 2048,
        "global_batch_size": 64,
        "framework": "hf-trainer",
    }
    assert {key: query["training"][key] for key in training} == training
    assert query["training"]["lora"]["rank"] == 16
    parallel = {"micro_batch_size": 1, "zero_stage": 0, "recompute": "full"}
    assert {key: query["parallel"][key] for key in parallel} == parallel


def test_in_full_over_deepspeed_without_recomputation() -> None:
    text = LORA.replace(
        "finetuning_type: lora",
        "finetuning_type: full\ndeepspeed: configs/ds_z3_config.json",
    )
    text = text.replace(
        "lora_rank: 16\nlora_target: all", "disable_gradient_checkpointing: true\ncutoff_len: 4096"
    )
    with pytest.raises(InputError, match=r"ds_z3_config\.json: file not found"):
        read_query(text, num_gpus=8, overrides=H100)
    query = read_query(text, num_gpus=8, overrides=H100, files={"ds_z3_config.json": ZERO})
    assert "lora" not in query["training"]
    assert (query["training"]["framework"], query["training"]["sequence_length"]) == (
        "deepspeed",
        4096,
    )
    assert (query["parallel"]["zero_stage"], query["parallel"]["recompute"]) == (3, "none")


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("stage: dpo", "stage dpo"),
        ("finetuning_type: oft", "finetuning_type oft"),
        ("use_galore: true", "use_galore"),
        ("quantization_bit: 8", "quantization_bit 8"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, word: str) -> None:
    kept = "\n".join(
        line for line in LORA.splitlines() if not line.startswith(key.partition(":")[0])
    )
    with pytest.raises(InputError, match=word):
        read_query(f"{kept}\n{key}\n", num_gpus=8, overrides=H100)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "int4"),
        ("TheBloke/Llama-2-7B-GPTQ", "int4"),
        ("unsloth/llama-3-8b-Instruct-bnb-4bit", "nf4"),
    ],
)
def test_a_quantised_checkpoint_is_frozen_in_its_bits(model: str, kind: str) -> None:
    text = LORA.replace("meta-llama/Meta-Llama-3-8B-Instruct", model)
    query = read_query(text, num_gpus=8, overrides=H100)
    assert query["training"]["frozen_precision"] == kind
    with pytest.raises(InputError, match="weights cannot be trained"):
        read_query(text.replace("finetuning_type: lora", "finetuning_type: full"), num_gpus=8)


@pytest.mark.parametrize(
    "name", ["Llama-2-7b-AQLM-2Bit-1x16-hf", "Llama-3.1-8B-FP8", "L-GPTQ-Int8"]
)
def test_other_quantised_checkpoints_are_named(name: str) -> None:
    text = LORA.replace("Meta-Llama-3-8B-Instruct", name)
    with pytest.raises(InputError, match=f"{name}: frozen weights in"):
        read_query(text, num_gpus=8, overrides=H100)


COMMAND = "FORCE_TORCHRUN=1 llamafactory-cli train examples/train_lora/lora.yaml {words}\n"


def test_a_command_is_read_by_the_file_that_it_names() -> None:
    read = read_query(
        COMMAND.format(words="per_device_train_batch_size=4 output_dir=$OUT"),
        num_gpus=8,
        overrides=H100,
        files={"examples/train_lora/lora.yaml": LORA},
    )
    own = read_query(LORA, num_gpus=8, overrides=H100)
    ratio = 4 / own["parallel"]["micro_batch_size"]
    assert read["parallel"] == own["parallel"] | {"micro_batch_size": 4}
    assert read["training"]["global_batch_size"] == ratio * own["training"]["global_batch_size"]


@pytest.mark.parametrize(
    ("words", "files", "word"),
    [
        ("", {}, r"examples/train_lora/lora\.yaml: file not found"),
        ("--lr 1", {"lora.yaml": LORA}, "--lr: expected KEY=VALUE after LLaMA-Factory's file"),
    ],
)
def test_a_command_names_what_is_missing(words: str, files: dict[str, str], word: str) -> None:
    with pytest.raises(InputError, match=word):
        read_query(COMMAND.format(words=words), num_gpus=8, overrides=H100, files=files)
