"""Settings that a configuration omits have its tool's defaults, not those of a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.formats.exchange import read_configuration
from hp_tool.questions import schema, training

MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 1024 \\
  --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 \\
  --global-batch-size 64 --bf16 --vocab-size 32000 --train-iters 10 --lr 1e-4"""
BRIDGE = """
model: {_target_: megatron.bridge.models.gpt_provider.GPTModelProvider, num_layers: 16,
  hidden_size: 1024, num_attention_heads: 16, seq_length: 2048, vocab_size: 32000,
  position_embedding_type: rope}
train: {micro_batch_size: 1, global_batch_size: 64, train_iters: 10}
mixed_precision: bf16_mixed
"""
TRAINER = """torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B \\
  --output_dir out --block_size 2048"""
TRL = """model_name_or_path: meta-llama/Llama-3.1-8B
learning_rate: 2.0e-5
output_dir: out
"""
AXOLOTL = """base_model: NousResearch/Llama-3.2-1B
micro_batch_size: 1
sequence_len: 2048
datasets: [{path: x, type: alpaca}]
"""
LLAMA_FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B
template: llama3
dataset: x
output_dir: out
bf16: true
"""
SWIFT = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --dataset x --max_length 2048"
MEGATRON_SWIFT = (
    "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --dataset x --max_length 4096"
)
TORCHTUNE = """tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
optimizer: {_component_: torch.optim.AdamW}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
dtype: bf16
"""
TORCHTITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[activation_checkpoint]
mode = "none"
"""
AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 1}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained,
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}
distributed: {strategy: fsdp2}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
optimizer: {_target_: torch.optim.Adam}
dataset: {seq_length: 2048}
"""
DEEPSPEED = (
    """{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}"""
)
NANOTRON = """
general: {project: x, run: y}
parallelism: {dp: 8, tp: 1, pp: 1}
tokens: {micro_batch_size: 1, sequence_length: 2048, batch_accumulation_per_replica: 4}
model:
  dtype: bfloat16
  model_config: {num_hidden_layers: 16, hidden_size: 2048, num_attention_heads: 16,
    num_key_value_heads: 16, intermediate_size: 5632, vocab_size: 32000}
optimizer: {zero_stage: 1}
"""
GIVEN: dict[str, dict[str, Any]] = {
    "deepspeed, a file": {"model": "llama-3.1-8b", "training.sequence_length": 2048}
}
"""Fields that a user sets because the configuration cannot."""
CORE = {
    "training.cuda_graphs": False,
    "training.gradient_precision": "fp32",
    "training.optimizer_precision": "fp32",
    "training.offload": "none",
    "training.overlap.data_parallel": False,
}
"""Megatron Core's defaults (releases 0.9 to 0.20), which its tools share."""
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron-lm": (
        MEGATRON,
        CORE
        | {
            "training.cross_entropy": "unfused",
            "training.dropout": 0.1,
            "parallel.sequence_parallel": False,
            "parallel.recompute": "none",
            "parallel.zero_stage": 0,
            "parallel.virtual_pipeline_parallel_size": 1,
        },
    ),
    "megatron-lm, tensor parallelism": (
        MEGATRON + " --tensor-model-parallel-size 2 --sequence-parallel",
        {"training.overlap.tensor_parallel": False, "parallel.sequence_parallel": True},
    ),
    "megatron-lm, experts": (
        MEGATRON + " --num-experts 8 --expert-model-parallel-size 8",
        CORE
        | {
            "training.overlap.expert_parallel": False,
            "training.expert_capacity_factor": None,
            "parallel.moe_token_dispatcher_type": "allgather",
        },
    ),
    "megatron-lm, fp8": (
        MEGATRON + " --fp8-format hybrid",
        {"training.fp8_recipe": "delayed", "training.parameter_precision": "bf16"},
    ),
    "nemo": (
        BRIDGE,
        CORE
        | {
            "training.cross_entropy": "unfused",
            "parallel.recompute": "none",
            "parallel.zero_stage": 0,
        },
    ),
    "ms-swift, megatron": (
        MEGATRON_SWIFT,
        CORE
        | {
            "training.cross_entropy": "fused",
            "training.overlap.expert_parallel": False,
            "parallel.moe_token_dispatcher_type": "alltoall",
            "parallel.recompute": "selective",
            "parallel.zero_stage": 1,
        },
    ),
    "deepspeed": (
        TRAINER,
        {
            "training.precision": "fp32",
            "training.cross_entropy": None,
            "training.offload": None,
            "parallel.micro_batch_size": 8,
            "parallel.zero_stage": 0,
            "parallel.recompute": "none",
        },
    ),
    "deepspeed, a file": (DEEPSPEED, {"parallel.zero_stage": 0, "training.offload": None}),
    "trl": (
        TRL,
        {
            "training.precision": "bf16",
            "training.parameter_precision": "fp32",
            "training.sequence_length": 1024,
            "parallel.micro_batch_size": 8,
            "parallel.recompute": "full",
        },
    ),
    "axolotl": (AXOLOTL, {"parallel.recompute": "none", "training.cross_entropy": None}),
    "llama-factory": (
        LLAMA_FACTORY,
        {
            "training.task": "lora",
            "training.lora.rank": 8,
            "training.sequence_length": 2048,
            "parallel.micro_batch_size": 8,
            "parallel.recompute": "full",
        },
    ),
    "ms-swift": (
        SWIFT,
        {
            "training.task": "lora",
            "training.lora.rank": 8,
            "parallel.micro_batch_size": 1,
            "training.global_batch_size": 16,
            "parallel.recompute": "full",
        },
    ),
    "torchtune": (TORCHTUNE, {"parallel.recompute": "none", "parallel.tensor_parallel_size": 1}),
    "torchtitan": (
        TORCHTITAN,
        {"parallel.zero_stage": 3, "training.parameter_precision": None},
    ),
    "nemo-automodel": (AUTOMODEL, {"parallel.recompute": "none", "parallel.zero_stage": 3}),
    "nanotron": (NANOTRON, {"parallel.recompute": "none", "parallel.sequence_parallel": False}),
}
"""A configuration with no more than its tool requires, and the values that its tool then uses; None
for fields that the query omits because the framework has no other default.
"""


@pytest.mark.parametrize(
    ("text", "is_fused"),
    [
        (TRAINER, None),
        (TRAINER + " --torch_compile", True),
        (TRAINER + " --torch_compile False", None),
        (TRL + "use_liger_kernel: true\n", True),
        (AXOLOTL + "liger_rms_norm: true\nliger_glu_activation: true\n", True),
        (AXOLOTL + "liger_rms_norm: true\n", None),
        (AXOLOTL + "torch_compile: true\n", True),
        (SWIFT + " --use_liger_kernel true", True),
        (LLAMA_FACTORY + "enable_liger_kernel: true\nrope_scaling: yarn\n", True),
    ],
)
def test_compiled_trainers_and_ligers_kernels_are_fused(text: str, is_fused: bool | None) -> None:
    given = {"cluster.gpu": "h100-sxm-80gb"}
    query = read_configuration(text, num_gpus=8, overrides=given).query
    assert query["training"].get("kernel_fusion") is is_fused


@pytest.mark.parametrize("name", TABLE)
def test_omitted_settings_have_the_defaults_of_the_tool(name: str) -> None:
    text, expected = TABLE[name]
    reading = read_configuration(
        text,
        num_gpus=8,
        overrides={"cluster.gpu": "h100-sxm-80gb"} | GIVEN.get(name, {}),
        format="torchtitan" if name == "torchtitan" else None,
    )
    values = {path: _value_at(reading.query, path) for path in expected}
    assert values == expected
    query = schema.parse_query(reading.query)
    assert query.training is not None and query.training.recipe is None
    if query.training.framework == "megatron-core":
        provenance = training.estimate(query=query, with_fixes=False).provenance
        assert "usual" not in provenance and "training.recipe" not in provenance["assumed"]


def _value_at(query: dict[str, Any], path: str) -> Any:
    node: Any = query
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node
