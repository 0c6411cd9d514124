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
BESIDE = "for_the_training_script"
"""A key that neither DeepSpeed nor the Trainer looks at: arguments that have to stand beside the file."""
RECOMPUTES = (
    "this file does not make a Trainer recompute activations, and DeepSpeed's activation_checkpointing block would not either: "
    "pass --gradient_checkpointing true to the Trainer, or call deepspeed.checkpointing in your own model"
)
_GRADIENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the JSON file's content. Raises UnsupportedError for what it cannot say."""
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
        content[BESIDE] = {"gradient_checkpointing": True, "note": RECOMPUTES}
    elif setup.recompute.granularity != "none":
        raise UnsupportedError(f"{TOOL} checkpoints whole layers: none or full", field="parallel.recompute")
    return content


def text(setup: TrainingSetup) -> str:
    """Return the file, ready to pass as --deepspeed_config."""
    return json.dumps(config(setup), indent=2) + "\n"


def notes(text: str) -> tuple[str, ...]:
    """Return what a written file says to whoever starts the training script."""
    note = json.loads(text).get(BESIDE, {}).get("note")
    return () if note is None else (note,)
