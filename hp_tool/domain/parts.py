"""Parts of a training step, of memory and of a request's latency. The cost model, calibrations,
explanations, the terminal and pages use their names, groups and colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Factor = Literal["compute", "attention", "communication", "memory_bound"]
"""Calibration groups. A calibration multiplies the times of all parts in a group by one
factor.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a quantity; the parts sum to the quantity."""

    key: str
    """Name in JSON."""
    label: str
    """Label in tables and figures."""
    noun: str = ""
    """Name in a sentence; empty: the same as `label`."""
    colour: int | None
    """Index in the palette of figures; None: the colour of idle time."""
    factor: Factor = "compute"
    """Calibration group of the part."""
    per_micro_batch: bool = False
    """Whether a stage repeats the part for each micro-batch."""
    computes: bool = False
    """Whether the part consists of the model's kernels, which can hide communication."""
    communicates: bool = False
    """Whether the part uses a link."""
    sharded: bool = False
    """Whether the part depends on how optimizer states, gradients and weights are sharded."""
    measured: bool = True
    """Whether a trace can determine a calibration factor for the part. A bubble is caused by the
    compute of other ranks, and overhead can have any cause.
    """

    @property
    def in_words(self) -> str:
        """Name in a sentence."""
        return self.noun or self.label


STEP = (
    Part(
        key="compute",
        label="compute",
        noun="compute time",
        colour=1,
        per_micro_batch=True,
        computes=True,
    ),
    Part(
        key="attention",
        label="attention",
        colour=8,
        factor="attention",
        per_micro_batch=True,
        computes=True,
    ),
    Part(
        key="recompute",
        label="recompute",
        noun="recomputation",
        colour=2,
        per_micro_batch=True,
        computes=True,
    ),
    Part(
        key="tensor_parallel",
        label="tensor parallel",
        noun="tensor-parallel communication",
        colour=3,
        factor="communication",
        per_micro_batch=True,
        communicates=True,
    ),
    Part(
        key="context_parallel",
        label="context parallel",
        noun="context-parallel communication",
        colour=5,
        factor="communication",
        per_micro_batch=True,
        communicates=True,
    ),
    Part(
        key="expert_parallel",
        label="expert parallel",
        noun="expert all-to-all",
        colour=7,
        factor="communication",
        per_micro_batch=True,
        communicates=True,
    ),
    Part(
        key="pipeline_bubble",
        label="pipeline bubble",
        colour=None,
        measured=False,
    ),
    Part(
        key="pipeline_p2p",
        label="pipeline transfers",
        noun="transfers between stages",
        colour=9,
        factor="communication",
        communicates=True,
    ),
    Part(
        key="data_parallel",
        label="data parallel",
        noun="data-parallel communication",
        colour=6,
        factor="communication",
        communicates=True,
        sharded=True,
    ),
    Part(
        key="optimizer",
        label="optimizer",
        noun="optimizer step",
        colour=4,
        factor="memory_bound",
        computes=True,
        sharded=True,
    ),
    Part(
        key="offload",
        label="offload",
        noun="copies between device and host",
        colour=10,
        factor="memory_bound",
        sharded=True,
    ),
    Part(
        key="overhead",
        label="overhead",
        noun="idle time",
        colour=11,
        measured=False,
    ),
)
"""Parts of a training step, in seconds of exposed time."""

UNKNOWN_KERNELS = Part(
    key="unknown", label="unknown", noun="unknown kernels", colour=11, computes=True
)
"""Part for kernels of a recorded step that match no rule."""

MEMORY = (
    Part(key="weights", label="weights", colour=1),
    Part(key="gradients", label="gradients", colour=3),
    Part(key="optimizer", label="optimizer", noun="optimizer states", colour=4),
    Part(key="activations", label="activations", colour=2),
    Part(key="logits", label="logits", colour=5),
    Part(key="buffers", label="buffers", noun="communication buffers", colour=6),
    Part(key="overhead", label="overhead", colour=11),
)
"""Parts of the memory of a training run on one device, in bytes."""

SERVING_MEMORY = (
    Part(key="weights", label="weights", colour=1),
    Part(key="kv_cache", label="KV cache", colour=7),
    Part(key="activations", label="activations", colour=2),
    Part(key="logits", label="logits", colour=5),
    Part(key="overhead", label="overhead", colour=11),
)
"""Parts of a serving replica's memory on one device, in bytes."""

REQUEST = (
    Part(key="queue", label="queue", colour=8),
    Part(key="front_end", label="front end", colour=6),
    Part(key="prefill", label="prefill", colour=2),
    Part(key="prefill_interference", label="prefill of other requests", colour=3),
    Part(key="decode", label="decode", colour=1),
)
"""Parts of a request's latency, in seconds."""

TIMED = (
    Part(key="passes", label="passes", noun="forward and backward passes", colour=1),
    Part(
        key="pipeline",
        label="pipeline",
        noun="pipeline bubble and transfers",
        colour=None,
    ),
    Part(
        key="passes_and_pipeline",
        label="passes and pipeline",
        noun="forward and backward passes with the pipeline",
        colour=1,
    ),
    Part(key="rest", label="rest", noun="time outside all timers", colour=11),
)
"""Parts of a step that a log's timers measure in addition to those in STEP."""

PARTS: dict[str, Part] = {
    part.key: part
    for parts in (MEMORY, SERVING_MEMORY, REQUEST, TIMED, (UNKNOWN_KERNELS,), STEP)
    for part in parts
}
"""All parts by key. A key that occurs both for memory and for a step has the same label and colour
in both.
"""
STEP_KEYS = tuple(part.key for part in STEP)
MEMORY_KEYS = tuple(part.key for part in MEMORY)
SERVING_MEMORY_KEYS = tuple(part.key for part in SERVING_MEMORY)
COMMUNICATION = tuple(part.key for part in STEP if part.communicates)
PER_MICRO_BATCH = tuple(part.key for part in STEP if part.per_micro_batch)
ONCE_A_STEP = tuple(part.key for part in STEP if not part.per_micro_batch)
SHARDED = tuple(part.key for part in STEP if part.sharded)
COMPUTING = tuple(part.key for part in STEP if part.computes and part.per_micro_batch)
"""Keys of parts that are passes of the model: all computing parts except the optimizer."""


def factor(key: str) -> Factor:
    """Return the calibration group of a part; `compute` for keys of serving objectives."""
    return PARTS[key].factor if key in PARTS else "compute"


def label(key: str) -> str:
    """Return the label of a part; for other keys, the key in words."""
    return PARTS[key].label if key in PARTS else key.replace("_", " ")
