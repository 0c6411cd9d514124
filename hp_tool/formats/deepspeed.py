"""DeepSpeed 0.18's JSON configuration, both ways: keys as in its reference (deepspeed.ai/docs/config-json)."""

import json
from typing import Any

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.setup import SHAPE, TrainingSetup, refuse_unsaid

TOOL = "DeepSpeed 0.18"
SAID = {
    "sequence_length", "global_batch_size", "precision", "gradient_precision", "attention", "dropout", "optimizer",
    "cross_entropy", "micro_batch_size", "recompute", "zero_stage", "offload",
}  # fmt: skip
_GRADIENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def config(setup: TrainingSetup) -> dict[str, Any]:
    """The JSON file's content. Raises UnsupportedError for what it cannot say."""
    refuse_unsaid(setup, tool=TOOL, said=SAID | SHAPE)
    w, c = setup.workload, setup.parallel
    if w.precision not in ("bf16", "fp16", "fp32"):
        raise UnsupportedError(f"{TOOL} has no setting for precision {w.precision}", field="training.precision")
    zero: dict[str, Any] = {"stage": c.zero_stage}
    if c.zero_stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if w.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    elif w.offload not in (None, "none"):
        raise UnsupportedError(f"{TOOL} has no setting for offload of {w.offload}", field="training.offload")
    content: dict[str, Any] = {
        "train_batch_size": w.global_batch_size,
        "train_micro_batch_size_per_gpu": c.micro_batch_size,
        "gradient_accumulation_steps": setup.accumulation_steps,
        "zero_optimization": zero,
        "optimizer": {"type": {"adam": "AdamW", "sgd": "SGD", "muon": "Muon"}[w.optimizer], "params": {}},
    }
    if w.precision != "fp32":
        content[w.precision] = {"enabled": True}
        content["data_types"] = {"grad_accum_dtype": _GRADIENTS[w.gradient_precision or "fp32"]}
    if setup.recompute.granularity == "full":
        content["activation_checkpointing"] = {
            "partition_activations": False,
            "number_checkpoints": setup.model.num_hidden_layers,
        }
    elif setup.recompute.granularity != "none":
        raise UnsupportedError(f"{TOOL} checkpoints whole layers: none or full", field="parallel.recompute")
    return content


def text(setup: TrainingSetup) -> str:
    """The file, ready to pass as --deepspeed_config."""
    return json.dumps(config(setup), indent=2) + "\n"


def read(content: dict[str, Any], *, num_gpus: int) -> dict[str, Any]:
    """What a configuration says of a query; the model and training.sequence_length are still to be added.

    Raises InputError where the batch sizes do not agree, UnsupportedError for what is not modelled.
    """
    zero = content.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise InputError("zero_optimization must be an object", field="zero_optimization")
    if content.get("tensor_parallel") or zero.get("offload_param"):
        name = "tensor_parallel" if content.get("tensor_parallel") else "zero_optimization.offload_param"
        raise UnsupportedError(f"{name} is not modelled", field=name)
    micro, steps, batch = (
        _count(content, name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    batch = batch or (micro or 1) * (steps or 1) * num_gpus
    micro = micro or max(batch // ((steps or 1) * num_gpus), 1)
    if steps is not None and batch != micro * steps * num_gpus:
        raise InputError(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x "
            f"{num_gpus} GPUs; change one of them",
            field="train_batch_size",
        )
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"zero_optimization.stage must be from 0 to 3, got {stage!r}", field="zero_optimization.stage")
    training: dict[str, Any] = {"global_batch_size": batch, "precision": _precision(content)}
    kept = content.get("data_types", {}).get("grad_accum_dtype")
    if kept in _GRADIENTS and kept != "fp32":
        training["gradient_precision"] = kept
    if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        training["offload"] = "optimizer"
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "micro_batch_size": micro, "zero_stage": stage}
    parallel["recompute"] = "full" if "activation_checkpointing" in content else "none"
    return {"kind": "training", "training": training, "parallel": parallel}


def _count(content: dict[str, Any], name: str) -> int | None:
    value = content.get(name)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} must be a whole number, got {value!r}", field=name)
    return value


def _precision(content: dict[str, Any]) -> str:
    sections = {name: content[name] for name in ("bf16", "fp16") if isinstance(content.get(name), dict)}
    return next((name for name, section in sections.items() if section.get("enabled") is True), "fp32")
