"""A watched job: its step reports, its expected step time, and the verdict on it."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval, MaxLen

from hp_tool.domain.fields import NonNegative, Strict
from hp_tool.domain.measurement import Seconds

MAX_REPORTS = 1000
"""Maximum number of steps per message."""
Name = Annotated[str, MaxLen(200)]
Number = Annotated[int, Interval(ge=0, le=1 << 53)]
Work = Annotated[float, Interval(ge=1e-6, le=1e15)]
Status = Literal["learning", "as_expected", "slower_than_it_was", "slower_than_it_should_be"]
Shape = Literal["sudden", "growing", "recurring"]
CauseKind = Literal["some_ranks", "all_ranks", "communication", "part", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Strict):
    """One optimizer step, as reported by a process of the job."""

    seq: Annotated[int, Interval(ge=1, le=1 << 53)]
    """Sequence number of the report, from 1 per source; reports already received are ignored."""
    step_s: Seconds
    """Seconds of the step."""
    step: Number | None = None
    """The trainer's step number; may decrease after a restart from a checkpoint."""
    samples: Work | None = None
    """Sequences of the step on all ranks. If tokens or samples are reported, steps are compared by
    seconds per token, else per sample, so that a growing batch is not a slowdown.
    """
    tokens: Work | None = None
    """Tokens of the step on all ranks."""
    parts_s: dict[Name, NonNegative] = field(default_factory=dict)
    """Seconds of the step by part, on this process. `communication` includes waiting for other
    ranks; all other parts count as the rank's own work.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch(Strict):
    """The newest steps of one process of a job."""

    source: Annotated[str, MaxLen(64)]
    """Name of one process between two restarts; a restarted process counts from 1 again under
    another name.
    """
    rank: Annotated[int, Interval(ge=0, le=1 << 20)] = 0
    host: Name | None = None
    dropped: Number = 0
    """Steps that the process dropped before the service received them."""
    reports: Annotated[tuple[StepReport, ...], MaxLen(MAX_REPORTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The step time predicted by the cost model, calibrated if possible."""

    step_s: float
    interval: tuple[float, float]
    """90% interval in seconds."""
    calibration: str | None = None
    """Version of the calibration; None: not calibrated."""
    num_gpus: int
    price_per_gpu_hour: float | None = None
    layout: str = ""
    """The configuration of the prediction in words, because the query may leave it open."""
    samples: float | None = None
    """Sequences per step in the prediction; None: jobs are compared whatever their batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Median step time over a period. If the job reports its batch size, it is the median at the
    newest batch size.
    """

    step_s: float
    interval: tuple[float, float]
    """90% interval of the median, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How much slower the job is now than before."""

    factor: float
    """Ratio of the new step time to the old one, such as 1.1 for 10% longer."""
    interval: tuple[float, float]
    """90% interval of the factor."""
    since_step: int
    """First slow step, by the trainer's step number if reported."""
    told_step: int
    """Step after which the slowdown was detected."""
    shape: Shape
    """`recurring`: some steps are slow, again and again. The factor is then that of the mean step
    time.
    """
    period: int | None = None
    """For `recurring`: number of steps between two slow steps; None for bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How much slower the job is than expected."""

    factor: float
    interval: tuple[float, float]
    """90% interval, from the uncertainty of the job's median and of the expectation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A possible cause of a slowdown."""

    kind: CauseKind
    ranks: tuple[int, ...] = ()
    """For `some_ranks`: the slow ranks, slowest first."""
    hosts: tuple[str, ...] = ()
    part: str | None = None
    share: float | None = None
    """Growth of this part as a fraction of the slowdown."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss per day caused by a slowdown."""

    hours: float
    """Hours per day lost compared with the earlier pace."""
    gpu_hours: float | None = None
    cost: float | None = None
    """US dollars; None without a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on a job after its newest step."""

    status: Status
    steps: int
    """Number of steps received."""
    dropped: int = 0
    """Number of steps that reporters dropped."""
    ranks: int = 1
    """Number of processes that reported."""
    now: Pace | None = None
    """Current pace; None during the first steps, and for a log of rates without a query."""
    was: Pace | None = None
    """Fastest steady pace so far; None if there was none."""
    expected: Expected | None = None
    slowdown: Slowdown | None = None
    lag: Lag | None = None
    causes: tuple[Cause, ...] = ()
    loss_per_day: Loss | None = None
    text: tuple[str, ...] = ()
    """The verdict in sentences; empty if the job is as expected."""

    @property
    def slow(self) -> bool:
        """Whether there is a slowdown to report."""
        return self.status in ("slower_than_it_was", "slower_than_it_should_be")
