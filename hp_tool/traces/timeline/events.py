"""Columns of one rank's events: kernels (CPU: operators), collectives, host phases and steps."""

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
"""Kinds of events. `experts` are grouped matmuls and token permutation, and `elementwise` is other
compute. `copy_host` is a copy between device and host. `unknown` kernels match no rule and may
compute or communicate.
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
"""Maximum number of listed names of unknown kernels."""
MAX_NAME_CHARACTERS = 200
"""Number of characters stored of such a name."""
WORKLOADS = ("training", "serving")
"""Kinds of work that can be identified by kernel and span names."""
PHASES = ("optimizer", "recompute", "backward")
"""Phases marked by host spans. Kernels launched in `optimizer` belong to the optimizer. Kernels
launched in `recompute` are recomputed, except within a nested `backward` span.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, as recorded in the trace."""

    part: str
    """Entry of COMMUNICATION to which its messages belong."""
    ranks: tuple[int, ...] = ()
    """Ranks of the members; empty if not recorded."""
    name: str = ""
    """Name given by the framework."""
    size: int = 0
    """Number of members if the trace abbreviates their list; 0 if it is the length of `ranks`."""

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
    """Columns of the collectives of one rank, shape (m,), in the order of events."""

    event: IntArray = field(default_factory=_no_ints)
    """Index of the event."""
    operation: IntArray = field(default_factory=_no_ints)
    """Index in COLLECTIVES."""
    group: IntArray = field(default_factory=_no_ints)
    """Index in `RankEvents.groups`."""
    size_bytes: FloatArray = field(default_factory=_no_floats)
    """Size of a rank's input or output in bytes, whichever is larger; NaN if not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Columns of host thread spans, shape (k,)."""

    phase: IntArray = field(default_factory=_no_ints)
    """Index in PHASES."""
    start_s: FloatArray = field(default_factory=_no_floats)
    end_s: FloatArray = field(default_factory=_no_floats)
    thread: IntArray = field(default_factory=_no_ints)


@dataclass(slots=True, kw_only=True)
class Signs:
    """Hints about the kind of work, from kernel and span names."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORKLOADS, 0.0))
    """Seconds in kernels that occur in only one kind of work, by kind."""
    serving_span: bool = False
    """True if a host span is a step of a serving engine."""
    unknown_s: dict[str, float] = field(default_factory=dict)
    """Seconds in kernels of kind `unknown`, by name, for at most MAX_UNKNOWN_NAMES names."""

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
    """Recorded events of one rank. Times are in seconds on its clock."""

    rank: int
    start_s: FloatArray
    """(n,) start of each kernel."""
    end_s: FloatArray
    kind: IntArray
    """(n,) index in KINDS."""
    launch_s: FloatArray
    """(n,) time at which the host launched each kernel; NaN if not recorded. An operator of a CPU
    process is its own launch.
    """
    thread: IntArray
    """(n,) host thread that launched each kernel."""
    collectives: Collectives = field(default_factory=Collectives)
    groups: tuple[Group, ...] = ()
    phases: Phases = field(default_factory=Phases)
    steps_s: FloatArray = field(default_factory=lambda: np.empty((0, 2)))
    """(steps, 2) start and end of marked steps on the host, in order."""
    flops: FloatArray = field(default_factory=lambda: np.empty((0, 2)))
    """(k, 2) call time and FLOPs of matmuls with recorded shapes."""
    on_device: bool = True
    """False if the events are operators of a CPU process."""
    device: str = ""
    """Device name; empty if not recorded."""
    world_size: int = 0
    """Number of ranks in the job; 0 if not recorded."""
    signs: Signs = field(default_factory=Signs)
