"""Read YAML files of NeMo AutoModel 0.4 for pretraining and fine-tuning."""

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
from hp_tool.formats.trainer.arguments import SIXTEEN_BITS, pure_state_fields

_OPTIMIZERS = {
    "torch.optim.AdamW": "adam",
    "torch.optim.Adam": "adam",
    "torch.optim.SGD": "sgd",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": "adam",
}
_LOSSES = {
    "MaskedCrossEntropy": "unfused",
    "ChunkedCrossEntropy": "chunked",
    "FusedLinearCrossEntropy": "chunked",
    "TEParallelCrossEntropy": "fused",
}
"""Loss implementations, by class of nemo_automodel.components.loss."""
_RECIPES = (
    "TrainFinetuneRecipeForNextTokenPrediction",
    "BenchmarkingRecipeForNextTokenPrediction",
)
_MODEL_KEYS = (
    "pretrained-model-name-or-path",
    "config.pretrained-model-name-or-path",
    "config.name-or-path",
)
_SCHEDULES = {"1f1b": False, "interleaved1f1b": True}


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of AutoModel's file.

    Raises:
        InputError: The file is invalid.
    """
    settings = as_settings(source.keys(reading), lines=source.text)
    keys = Settings(
        sort_settings(settings, table=table("nemo-automodel"), reading=reading, spare=source.ignore)
    )
    recipe = (keys.text("recipe") or keys.text("recipe._target_", _RECIPES[0])).rpartition(".")[2]
    if recipe not in _RECIPES:
        reading.refuse(f"recipe {recipe} is not supported; supported: {', '.join(_RECIPES)}")
    if (strategy := keys.text("distributed.strategy", "fsdp2")) not in ("fsdp2", "ddp"):
        reading.refuse(f"distributed.strategy {strategy} is not supported; supported: fsdp2, ddp")
    named = (keys.text(f"model.{name}") for name in _MODEL_KEYS)
    model = next(filter(None, named), "")
    stages, batch = (
        keys.whole_number("distributed.pp-size"),
        keys.whole_number("step-scheduler.local-batch-size"),
    )
    resharded = keys.is_on("distributed.reshard-after-forward", default=stages == 1)
    parallel: dict[str, Any] = {
        "tensor_parallel_size": keys.whole_number("distributed.tp-size"),
        "pipeline_parallel_size": stages,
        "context_parallel_size": keys.whole_number("distributed.cp-size"),
        "expert_parallel_size": keys.whole_number("distributed.ep-size"),
        "micro_batch_size": batch,
        "zero_stage": 0 if strategy == "ddp" else 3 if resharded else 2,
        "recompute": _read_recompute(keys, reading),
    }
    if parallel["tensor_parallel_size"] > 1:
        parallel["sequence_parallel"] = keys.is_on("distributed.sequence-parallel")
    if stages > 1:
        size = keys.text("distributed.pipeline.pp-batch-size") and "pp-microbatch-size"
        parallel["micro_batch_size"] = keys.whole_number(
            f"distributed.pipeline.{size or 'pp-microbatch-size'}"
        )
        parallel |= _read_chunks(keys, source, model=model, stages=stages, reading=reading)
    training = _read_training(keys, reading)
    copies = keys.whole_number("distributed.dp-replicate-size")
    complete_layout(
        parallel,
        training,
        reading=reading,
        global_batch_size=keys.whole_number("step-scheduler.global-batch-size"),
        copies=copies,
    )
    reading.query = {"kind": "training", "training": training, "parallel": parallel}
    if model:
        reading.query["model"] = model


def _read_recompute(keys: Settings, reading: Reading) -> str:
    kind = keys.text("distributed.activation-checkpointing", "false")
    if kind not in ("true", "false", "full"):
        reading.refuse(
            f"distributed.activation_checkpointing {kind} is not supported; supported: "
            "true, full, false"
        )
    return "none" if kind == "false" else "full"


def _read_chunks(
    keys: Settings, source: Source, *, model: str, stages: int, reading: Reading
) -> dict[str, int]:
    """Return the number of model chunks per rank with an interleaved schedule.

    Source: calculate_virtual_stages of nemo_automodel/components/distributed/pipelining.
    """
    schedule = keys.text("distributed.pipeline.pp-schedule", "1f1b").lower()
    if schedule not in _SCHEDULES:
        reading.refuse(
            f"pp_schedule {schedule} is not supported; supported: {', '.join(_SCHEDULES)}"
        )
    if not _SCHEDULES.get(schedule):
        return {}
    per_chunk = keys.whole_number("distributed.pipeline.layers-per-stage", 0)
    if not per_chunk:
        return {"virtual_pipeline_parallel_size": 2}
    if (layers := source.layers_of(model)) is None:
        why = "the number of layers, which layers_per_stage divides, is unknown; add"
        reading.add_missing("parallel.virtual_pipeline_parallel_size", why, example=2)
        return {}
    chunks = -(-layers // per_chunk)
    rounding = keys.text("distributed.pipeline.round-virtual-stages-to-pp-multiple")
    if chunks % stages and rounding not in ("up", "down"):
        reading.refuse(
            f"layers_per_stage {per_chunk}: {chunks} chunks of {layers} layers do not divide over "
            f"{stages} stages"
        )
    per_rank = -(-chunks // stages) if rounding == "up" else chunks // stages
    return {"virtual_pipeline_parallel_size": max(per_rank, 1)}


def _read_training(keys: Settings, reading: Reading) -> dict[str, Any]:
    dtype = keys.text("model.torch-dtype", keys.text("model.dtype", "bfloat16"))
    kind = SIXTEEN_BITS.get(dtype.removeprefix("torch.").replace("bf16", "bfloat16"))
    if kind is None and dtype not in ("float32", "torch.float32", "fp32", "auto"):
        reading.refuse(f"model.torch_dtype {dtype} is not supported; use 16 or 32 bits")
    training: dict[str, Any] = {"framework": "nemo-automodel"}
    if dtype.endswith(("32",)):
        training |= {"precision": "bf16", "parameter_precision": "fp32"}
    else:
        training |= {"precision": kind or "bf16", **pure_state_fields(kind or "bf16")}
    if keys.is_on("fp8.enabled"):
        training |= {"precision": "fp8", "fp8_recipe": keys.text("fp8.recipe-name", "tensorwise")}
    training |= _read_engine_fp8(keys, reading)
    training |= optimizer_fields(keys.text("optimizer._target_"), _OPTIMIZERS, reading)
    loss = keys.text("loss_fn._target_").rpartition(".")[2]
    if loss not in _LOSSES:
        reading.refuse(
            f"loss_fn {loss or '(none)'} is not supported; supported: {', '.join(_LOSSES)}"
        )
    training["cross_entropy"] = _LOSSES.get(loss, "unfused")
    if "eager" in (keys.text("model.attn-implementation"), keys.text("model.backend.attn")):
        training["attention"] = "unfused"
    if keys.is_on("compile.enabled"):
        training["kernel_fusion"] = True
    packed = keys.whole_number("packed-sequence.packed-sequence-size", 0)
    length = (
        packed
        or keys.whole_number("dataset.seq-length", 0)
        or keys.whole_number("dataset.seq-len", 0)
    )
    training |= {"sequence_length": length} if length else {}
    if keys.text("peft.dim"):
        training |= {"task": "lora", "lora": _read_lora(keys, reading)}
    if keys.is_on("quantization.load-in-4bit"):
        nested = keys.is_on("quantization.bnb-4bit-use-double-quant")
        quantized = keys.text("quantization.bnb-4bit-quant-type", "fp4")
        if quantized != "nf4" or not nested:
            reading.refuse(
                f"quantization {quantized}{'' if nested else ' with 32-bit scales'} is not "
                "supported; supported: nf4 with double quantisation"
            )
        training["frozen_precision"] = "nf4"
    return training


_ENGINE_RECIPES = {
    "mxfp8": {"precision": "mxfp8"},
    "current": {"precision": "fp8", "fp8_recipe": "tensorwise"},
    "block": {"precision": "fp8", "fp8_recipe": "blockwise"},
}
"""Precision fields for Transformer Engine's 8-bit recipes, by te_fp8.recipe."""


def _read_engine_fp8(keys: Settings, reading: Reading) -> dict[str, Any]:
    """Return the precision fields for Transformer Engine's 8-bit recipes."""
    recipe = keys.text("model.backend.te-fp8.recipe")
    if not recipe:
        return {}
    parts = (keys.text("model.backend.linear"), keys.text("model.backend.experts", "te"))
    if recipe not in _ENGINE_RECIPES or set(parts) != {"te"}:
        reading.refuse(
            f"model.backend.te_fp8 {recipe}: supported are {', '.join(_ENGINE_RECIPES)}, with "
            "Transformer Engine's linear layers and experts"
        )
    return _ENGINE_RECIPES.get(recipe, {})


def _read_lora(keys: Settings, reading: Reading) -> dict[str, Any]:
    lora: dict[str, Any] = {"rank": keys.whole_number("peft.dim", 8)}
    if dropout := parse_fraction(keys.text("peft.dropout", "0.0"), "peft.dropout"):
        lora["dropout"] = dropout
    targets = keys.by_name.get("peft.target-modules")
    if targets is not None and not keys.is_on("peft.match-all-linear"):
        names = [name.removeprefix("*") for name in targets.values]
        if not set(names) <= {"", "_proj"}:
            if any("*" in name or "." in name for name in names):
                reading.refuse(f"peft.target_modules {targets.text}: patterns are not supported")
            lora["target_modules"] = names
    return lora


register(
    Format(
        name="nemo-automodel",
        title="NeMo AutoModel",
        signs=(
            Sign(
                place="keys",
                rank=46,
                matches=matches_pattern(r"(?m)(?:^|[{,-])\s*_target_:\s*nemo_automodel\."),
            ),
        ),
        read=read,
        reads="NeMo AutoModel's YAML file for pretraining, full fine-tuning or LoRA",
    )
)
