"""YAML files of fine-tuning tools: whose they are, and what they ask for."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool import estimate
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.detection import detect_format
from hp_tool.formats.exchange import assess, read_configuration, read_query
from hp_tool.questions import schema

H100 = {"cluster.gpu": "h100-sxm-80gb"}
TRL = """
model_name_or_path: meta-llama/Llama-3.1-8B
torch_dtype: bfloat16
dataset_mixture: {datasets: [{id: some/set, config: default}], seed: 0}
chat_template: "{{ messages }}"
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
max_length: 4096
bf16: true
learning_rate: 2.0e-05
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 16
  lora_alpha: 32
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 8192
batch_size: 2
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
dtype: bf16
enable_activation_checkpointing: true
compile: false
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2, max_steps: 100}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
distributed: {strategy: fsdp2, tp_size: 2, sequence_parallel: false, activation_checkpointing: true}
packed_sequence: {packed_sequence_size: 4096}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5}
"""


def query(text: str, **more: Any) -> dict[str, Any]:
    return read_query(text, overrides=H100, num_gpus=8, **more)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (TRL, "trl"),
        (TORCHTUNE, "torchtune"),
        (AUTOMODEL, "nemo-automodel"),
        ("model_name_or_path: m\ntemplate: qwen\n", "llama-factory"),
        ("base_model: m\nchat_template: x\n", "axolotl"),
        ("bf16: {enabled: true}\n", "deepspeed"),
    ],
)
def test_decisive_keys_say_whose_a_file_is(text: str, name: str) -> None:
    assert detect_format(text) == name


def test_an_unknown_file_says_what_it_resembles() -> None:
    with pytest.raises(InputError, match=r"resembles trainer: 3 of its 3 keys.*supported: "):
        detect_format("bf16: true\nlearning_rate: 1e-4\nseed: 1\n")
    with pytest.raises(InputError, match="it has flavour, colour"):
        detect_format("flavour: sweet\ncolour: red\n")
    with pytest.raises(UnsupportedError, match="vLLM's recipes"):
        detect_format("meta: {}\nmodel: {}\nvariants: {}\n")


def test_trl_trains_weights_as_they_are_loaded() -> None:
    read = query(TRL)
    training = read["training"]
    assert (training["framework"], training["global_batch_size"]) == ("hf-trainer", 64)
    assert (training["parameter_precision"], training["master_precision"]) == ("bf16", "none")
    assert (read["parallel"]["zero_stage"], read["parallel"]["recompute"]) == (0, "full")
    wide = query(TRL.replace("torch_dtype: bfloat16\n", ""))["training"]
    assert wide["parameter_precision"] == "fp32" and "master_precision" not in wide


def test_trl_is_sharded_as_accelerates_file_says() -> None:
    file = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nmixed_precision: bf16\n"
    assert query(TRL, files={"zero3.yaml": file})["parallel"]["zero_stage"] == 3


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"{TRL}beta: 0.1\n", "preferences or rewards"),
        (f"{TRL}loss_type: sigmoid\n", "loss_type sigmoid"),
        (f"{TRL}of_my_own: 1\n", "of_my_own"),
        (f"{TORCHTUNE}optimizer_in_bwd: true\n", "optimizer_in_bwd"),
        (f"{TORCHTUNE}teacher_model: {{_component_: x}}\n", "distillation"),
        (f"{TORCHTUNE}of_my_own: 1\n", "of_my_own"),
        (AUTOMODEL.replace("MaskedCrossEntropy", "Other"), "loss_fn Other"),
        (AUTOMODEL.replace("fsdp2", "megatron_fsdp"), "megatron_fsdp"),
        (f"{AUTOMODEL}freeze_config: {{freeze_embeddings: true}}\n", "freeze_embeddings"),
    ],
)
def test_what_is_not_modelled_is_named(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        query(text)


def test_torchtune_names_its_models_and_adapters() -> None:
    read = query(TORCHTUNE)
    assert read["model"] == "llama-3.1-8b"
    assert read["training"]["lora"] == {
        "rank": 16,
        "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }
    assert (read["training"]["global_batch_size"], read["training"]["sequence_length"]) == (
        128,
        8192,
    )
    quantized = query(TORCHTUNE.replace(".lora_llama", ".qlora_llama"))["training"]
    assert quantized["frozen_precision"] == "nf4"


def test_automodel_splits_as_its_file_says() -> None:
    read = query(AUTOMODEL)
    assert read["parallel"]["tensor_parallel_size"] == 2
    assert read["parallel"]["sequence_parallel"] is False
    assert (read["training"]["global_batch_size"], read["training"]["sequence_length"]) == (
        64,
        4096,
    )


def test_automodel_multiplies_in_eight_bits_of_transformer_engine() -> None:
    load = "  pretrained_model_name_or_path"
    layers = f"  backend: {{linear: te, te_fp8: {{recipe: RECIPE}}}}\n{load}"
    text = AUTOMODEL.replace(load, layers)
    training = query(text.replace("RECIPE", "current"))["training"]
    assert (training["precision"], training["fp8_recipe"]) == ("fp8", "tensorwise")
    for wrong in (text.replace("RECIPE", "delayed"), text.replace("linear: te", "linear: torch")):
        with pytest.raises(InputError, match="te_fp8"):
            query(wrong)


@pytest.mark.parametrize("text", [TRL, TORCHTUNE, AUTOMODEL])
def test_what_is_read_is_answered(text: str) -> None:
    assert estimate(schema.parse_query(query(text))).estimate.memory is not None


def test_a_null_is_as_if_it_were_left_out() -> None:
    assert query(f"{TORCHTUNE}of_my_own: null\n") == query(TORCHTUNE)


@pytest.mark.parametrize(
    ("text", "flag"), [(TRL, "max_length"), (TORCHTUNE, "tokenizer.max_seq_len")]
)
def test_a_bound_of_lengths_is_named_unless_rows_are_packed(text: str, flag: str) -> None:
    def bounds(text: str) -> list[str]:
        reading = read_configuration(text, overrides=H100, num_gpus=8)
        return [each.flag for each in reading.ignored if each.reason.startswith("an upper bound")]

    assert bounds(text) == [flag]
    assert (
        bounds(f"{text}packing: true\n" if text is TRL else f"{text}dataset: {{packed: true}}\n")
        == []
    )


def test_changes_of_a_file_that_is_only_read_name_its_keys() -> None:
    reading = read_configuration(TORCHTUNE, overrides=H100, num_gpus=8)
    found = assess(schema.parse_query(reading.query), reading=reading)
    flags = {change["flag"]: change["from"] for change in found.changes}
    assert found.better is not None
    assert found.better.parallel.micro_batch_size != 2, "the change that this test is about"
    assert flags["batch_size"] == "2" and "parallel.micro_batch_size" not in flags
