"""Columns of one rank's events: kernels (CPU: operators), collectives, host phases, steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

KINDS = (
    "matmul",
    "attention",
    "experts",
    "elementwise",
    "optimizer",
    "copy_device",
    "copy_host",
    "unknown",
    "collective",
)
"""Kinds of events. `experts`: grouped matmuls and token permutation. `elementwise`: other compute
kernels. `copy_host`: between device and host. `unknown`: no rule recognizes the name, so the kernel
may compute or communicate.
"""
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_receive",
    "broadcast",
    "other",
)
MAX_UNKNOWN_NAMES = 1000
"""Limit on listed names of unknown kernels."""
MAX_NAME_CHARACTERS = 200
"""Characters stored of such a name."""
WORKLOADS = ("training", "serving")
"""Kinds of work that kernel and span names can identify."""
PHASES = ("optimizer", "recompute", "backward")
"""Host spans. A kernel launched in `optimizer` belongs to the optimizer; in `recompute` it is
recomputed, unless a `backward` span interrupts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, as recorded."""

    part: str
    """Part of COMMUNICATION to which its messages belong."""
    ranks: tuple[int, ...] = ()
    """Ranks of its members; empty if not recorded."""
    name: str = ""
    """Name given by the framework."""
    size: int = 0
    """Number of members, if the trace abbreviates their list; 0: the length of `ranks`."""

    @property
    def members(self) -> int:
        """Number of members; 0 if not recorded."""
        return len(self.ranks) or self.size


def _no_ints() -> IntArray:
    return np.empty(0, dtype=np.int64)


def _no_floats() -> FloatArray:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """(m,) columns of the collectives of one rank, in the order of events."""

    event: IntArray = field(default_factory=_no_ints)
    """Index of the event."""
    operation: IntArray = field(default_factory=_no_ints)
    """Index in COLLECTIVES."""
    group: IntArray = field(default_factory=_no_ints)
    """Index in `RankEvents.groups`."""
    size_bytes: FloatArray = field(default_factory=_no_floats)
    """Larger of a rank's input and output; NaN if not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """(k,) columns of spans on host threads."""

    phase: IntArray = field(default_factory=_no_ints)
    """Index in PHASES."""
    start_s: FloatArray = field(default_factory=_no_floats)
    end_s: FloatArray = field(default_factory=_no_floats)
    thread: IntArray = field(default_factory=_no_ints)


@dataclass(slots=True, kw_only=True)
class Signs:
    """Hints about the kind of work, from names of kernels and spans."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORKLOADS, 0.0))
    """Seconds in kernels that only one kind of work uses, by kind."""
    serving_span: bool = False
    """Whether a host span is a step of a serving engine."""
    unknown_s: dict[str, float] = field(default_factory=dict)
    """Seconds in kernels of kind `unknown`, by name; at most MAX_UNKNOWN_NAMES names."""

    def add(self, name: str, *, workload: str | None, unknown: bool, seconds: float) -> None:
        """Add one kernel."""
        if workload is not None:
            self.seconds[workload] += seconds
        if unknown:
            short = name[:MAX_NAME_CHARACTERS]
            if short in self.unknown_s or len(self.unknown_s) < MAX_UNKNOWN_NAMES:
                self.unknown_s[short] = self.unknown_s.get(short, 0.0) + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvents:
    """Recorded events of one rank; times in seconds of its clock."""

    rank: int
    start_s: FloatArray
    """(n,) start of each kernel."""
    end_s: FloatArray
    kind: IntArray
    """(n,) index in KINDS."""
    launch_s: FloatArray
    """(n,) time at which the host launched it; NaN if not recorded. An operator of a CPU process
    launches itself.
    """
    thread: IntArray
    """(n,) host thread that launched it."""
    collectives: Collectives = field(default_factory=Collectives)
    groups: tuple[Group, ...] = ()
    phases: Phases = field(default_factory=Phases)
    steps_s: FloatArray = field(default_factory=lambda: np.empty((0, 2)))
    """(steps, 2) start and end of marked steps on the host, in order."""
    flops: FloatArray = field(default_factory=lambda: np.empty((0, 2)))
    """(k, 2) time of the call and FLOPs of matmuls with recorded shapes."""
    on_device: bool = True
    """False if the events are operators of a CPU process."""
    device: str = ""
    """Device name; empty if not recorded."""
    world_size: int = 0
    """Number of ranks of the job; 0 if not recorded."""
    signs: Signs = field(default_factory=Signs)
