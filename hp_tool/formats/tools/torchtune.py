"""Read torchtune 0.6's YAML files for full, LoRA and QLoRA fine-tuning."""

import re
from typing import Any

from hp_tool.formats.fine_tuning import complete_layout, optimizer_fields
from hp_tool.formats.reading import (
    Reading,
    Settings,
    as_settings,
    parse_fraction,
    sort_settings,
    table,
)
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Sign, matches_pattern
from hp_tool.formats.source import Source
from hp_tool.formats.trainer.arguments import pure_state_fields

_OPTIMIZERS = {"torch.optim.AdamW": "adam", "torch.optim.Adam": "adam", "torch.optim.SGD": "sgd"}
_PAGED_OPTIMIZERS = ("bitsandbytes.optim.PagedAdamW", "bitsandbytes.optim.AdamW")
"""Adam variants of bitsandbytes with 32-bit states, whatever the precision of the parameters."""
_LOSSES = {
    "torchtune.modules.loss.LinearCrossEntropyLoss": "chunked",
    "torchtune.modules.loss.CEWithChunkedOutputLoss": "chunked",
    "torch.nn.CrossEntropyLoss": "unfused",
}
_MODELS = {
    "phi3_mini": "phi-3-mini-4k",
    "phi4_14b": "phi-4",
    # Qwen2 and Qwen2.5 have identical shapes.
    "qwen2_0_5b": "qwen2.5-0.5b",
    "qwen2_1_5b": "qwen2.5-1.5b",
    "qwen2_7b": "qwen2.5-7b",
}
"""Catalogue models of torchtune's model builders, if the names differ."""
_TARGETS = {"output_proj": "o_proj"}
_MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of torchtune's file.

    Raises:
        InputError: The file is invalid.
    """
    settings = as_settings(source.keys(reading), lines=source.text)
    keys = Settings(
        sort_settings(settings, table=table("torchtune"), reading=reading, spare=source.ignore)
    )
    if not keys.text("optimizer._component_") or not keys.text("model._component_"):
        reading.refuse("the file names no model or no optimizer")
    training = _read_training(keys, reading)
    shard, copies = (
        keys.whole_number("data-parallel-shard-dim", -1),
        keys.whole_number("data-parallel-replicate-dim"),
    )
    parallel: dict[str, Any] = {
        "tensor_parallel_size": keys.whole_number("tensor-parallel-dim"),
        "context_parallel_size": keys.whole_number("context-parallel-dim"),
        "pipeline_parallel_size": 1,
        "micro_batch_size": keys.whole_number("batch-size"),
        "zero_stage": 3,
        "recompute": "full" if keys.is_on("enable-activation-checkpointing") else "none",
    }
    complete_layout(
        parallel,
        training,
        reading=reading,
        accumulation_steps=keys.whole_number("gradient-accumulation-steps"),
        shard=shard if copies > 1 else 0,
        copies=copies,
    )
    reading.query = {"kind": "training", "training": training, "parallel": parallel}
    if component := keys.text("model._component_"):
        name = re.sub(r"^q?lora_|_(instruct|base)$", "", component.rpartition(".")[2])
        reading.query["model"] = _MODELS.get(name) or source.named(name) or name


def _read_training(keys: Settings, reading: Reading) -> dict[str, Any]:
    precision = keys.text("dtype", "fp32")
    training: dict[str, Any] = {
        "framework": "torchtune",
        "precision": precision,
    }
    training |= pure_state_fields(precision) if precision != "fp32" else {}
    optimizer = keys.text("optimizer._component_")
    if optimizer in _PAGED_OPTIMIZERS:
        training |= {"optimizer_precision": "fp32"}
    else:
        training |= optimizer_fields(optimizer, _OPTIMIZERS, reading)
    loss = keys.text("loss._component_")
    if loss not in _LOSSES:
        reading.refuse(f"loss {loss or '(none)'} is not supported; supported: {', '.join(_LOSSES)}")
    training["cross_entropy"] = _LOSSES.get(loss, "unfused")
    if keys.is_on("compile"):
        training["kernel_fusion"] = True
    if length := keys.text("tokenizer.max-seq-len"):
        training["sequence_length"] = int(length) if length.isdecimal() else length
        if not keys.is_on("dataset.packed"):
            reading.note_length_bound("tokenizer.max_seq_len")
    component = keys.text("model._component_").rpartition(".")[2]
    if component.startswith(("lora_", "qlora_")):
        attention = [
            _TARGETS.get(name, name) for name in keys.by_name["model.lora-attn-modules"].values
        ]
        mlp = _MLP_MATRICES if keys.is_on("model.apply-lora-to-mlp") else ()
        lora = {
            "rank": keys.whole_number("model.lora-rank", 8),
            "target_modules": [*attention, *mlp],
        }
        if dropout := parse_fraction(keys.text("model.lora-dropout", "0.0"), "lora_dropout"):
            lora["dropout"] = dropout
        training |= {"task": "lora", "lora": lora}
    if component.startswith("qlora_"):
        training["frozen_precision"] = "nf4"  # torchao's nf4 uses double quantisation.
    return training


register(
    Format(
        name="torchtune",
        signs=(
            Sign(
                place="keys",
                rank=45,
                matches=matches_pattern(r"(?m)(?:^|[{,])\s*_component_:\s*torchtune\."),
            ),
        ),
        logs=("torchtune",),
        read=read,
        reads="torchtune's YAML file for full, LoRA or QLoRA fine-tuning",
    )
)
