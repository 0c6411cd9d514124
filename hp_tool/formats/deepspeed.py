"""DeepSpeed 0.18's JSON configuration (deepspeed.ai/docs/config-json) from a setup; `trainer` reads it."""

import json
from typing import Any

from hp_tool.errors import UnsupportedError
from hp_tool.formats.setup import SHAPE, TrainingSetup, refuse_unsaid

TOOL = "DeepSpeed 0.18"
SAID = {
    "sequence_length", "global_batch_size", "precision", "gradient_precision", "attention", "dropout", "optimizer",
    "micro_batch_size", "recompute", "zero_stage", "offload",
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
