"""What one rank recorded, as columns: kernels (of a CPU process operators), collectives, phases of
its host, marked steps.
"""

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
"""Classes of events. `experts`: grouped matmuls and the permutation of tokens. `elementwise`: other
kernels known to compute. `copy_host`: between device and host. `unknown`: no rule recognizes the
name; the kernel may compute or communicate.
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
"""Names of unknown kernels that are listed."""
MAX_NAME_CHARACTERS = 200
"""Characters of such a name that are kept."""
WORKLOADS = ("training", "serving")
"""Kinds of work that names of kernels and spans give away."""
PHASES = ("optimizer", "recompute", "backward")
"""Spans of the host. A kernel launched in `optimizer` is the optimizer's; in `recompute` it runs
again, unless the span is interrupted by `backward`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group."""

    part: str
    """Which of COMMUNICATION its messages are."""
    ranks: tuple[int, ...] = ()
    """Its members; empty where they were not recorded."""
    name: str = ""
    """As its framework calls it."""
    size: int = 0
    """Number of its members, which a trace may say where it abbreviates their list; 0: as many as
    `ranks`.
    """

    @property
    def members(self) -> int:
        """How many ranks it has; 0 where nothing was recorded."""
        return len(self.ranks) or self.size


def _no_ints() -> IntArray:
    return np.empty(0, dtype=np.int64)


def _no_floats() -> FloatArray:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """(m,) columns of the events of kind `collective`, in their order."""

    event: IntArray = field(default_factory=_no_ints)
    """Index of its event."""
    operation: IntArray = field(default_factory=_no_ints)
    """Index in COLLECTIVES."""
    group: IntArray = field(default_factory=_no_ints)
    """Index in `RankEvents.groups`."""
    size_bytes: FloatArray = field(default_factory=_no_floats)
    """The larger of what a rank gives and gets; NaN where it was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """(k,) spans of host threads."""

    phase: IntArray = field(default_factory=_no_ints)
    """Index in PHASES."""
    start_s: FloatArray = field(default_factory=_no_floats)
    end_s: FloatArray = field(default_factory=_no_floats)
    thread: IntArray = field(default_factory=_no_ints)


@dataclass(slots=True, kw_only=True)
class Signs:
    """What names of kernels and spans tell of the work that one rank recorded."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORKLOADS, 0.0))
    """Kernels that only one of WORKLOADS has, by workload."""
    serving_span: bool = False
    """A span of the host is a step of a serving engine."""
    unknown_s: dict[str, float] = field(default_factory=dict)
    """Kernels of kind `unknown`, by name; those beyond MAX_UNKNOWN_NAMES names are not listed."""

    def add(self, name: str, *, workload: str | None, unknown: bool, seconds: float) -> None:
        """Count one kernel."""
        if workload is not None:
            self.seconds[workload] += seconds
        if unknown:
            short = name[:MAX_NAME_CHARACTERS]
            if short in self.unknown_s or len(self.unknown_s) < MAX_UNKNOWN_NAMES:
                self.unknown_s[short] = self.unknown_s.get(short, 0.0) + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvents:
    """Everything recorded of one rank that a step's account needs; seconds of this rank's clock."""

    rank: int
    start_s: FloatArray
    """(n,) of each kernel."""
    end_s: FloatArray
    kind: IntArray
    """(n,) index in KINDS."""
    launch_s: FloatArray
    """(n,) when its host asked for it; NaN where that was not recorded. An operator of a CPU
    process launches itself.
    """
    thread: IntArray
    """(n,) the host's thread that launched it."""
    collectives: Collectives = field(default_factory=Collectives)
    groups: tuple[Group, ...] = ()
    phases: Phases = field(default_factory=Phases)
    steps_s: FloatArray = field(default_factory=lambda: np.empty((0, 2)))
    """(steps, 2) start and end of marked steps on the host, in order."""
    flops: FloatArray = field(default_factory=lambda: np.empty((0, 2)))
    """(k, 2) when a matmul of recorded shape was called, and its floating-point operations."""
    on_device: bool = True
    """False: the events are operators of a CPU process."""
    device: str = ""
    """The device's name, where it was recorded."""
    world_size: int = 0
    """Number of ranks of the job; 0: not recorded."""
    signs: Signs = field(default_factory=Signs)
