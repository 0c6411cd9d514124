"""A running job under watch: what it reports, what is expected of it, and what is to be said of
it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval, MaxLen

from hp_tool.domain.fields import NonNegative, Strict
from hp_tool.domain.measurement import Seconds

MAX_REPORTS = 1000
"""Steps of one message."""
Name = Annotated[str, MaxLen(200)]
Number = Annotated[int, Interval(ge=0, le=1 << 53)]
Work = Annotated[float, Interval(ge=1e-6, le=1e15)]
Status = Literal["learning", "as_expected", "slower_than_it_was", "slower_than_it_should_be"]
Shape = Literal["sudden", "growing", "recurring"]
CauseKind = Literal["some_ranks", "all_ranks", "communication", "part", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Strict):
    """One optimizer step, as a process of the job saw it."""

    seq: Annotated[int, Interval(ge=1, le=1 << 53)]
    """1, 2, 3, ... of this source; one that was taken before is passed over."""
    step_s: Seconds
    """Seconds of the step."""
    step: Number | None = None
    """The trainer's number of the step; after a restart from a checkpoint it may go back."""
    samples: Work | None = None
    """Sequences of the step on all ranks. Steps are judged by their seconds a token, or else a
    sample, if these are reported: a growing batch is no slowdown.
    """
    tokens: Work | None = None
    """Tokens of the step on all ranks."""
    parts_s: dict[Name, NonNegative] = field(default_factory=dict)
    """Seconds of the step by part, this process's own. `communication` includes waiting for other
    ranks; all other names count as the rank's own work.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch(Strict):
    """The newest steps of one process of a job."""

    source: Annotated[str, MaxLen(64)]
    """Names one life of one process: a restarted one counts from 1 again under another name."""
    rank: Annotated[int, Interval(ge=0, le=1 << 20)] = 0
    host: Name | None = None
    dropped: Number = 0
    """Steps that the process could not keep until the service took them."""
    reports: Annotated[tuple[StepReport, ...], MaxLen(MAX_REPORTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The step time that the cost model predicts, corrected by a calibration where there is one."""

    step_s: float
    interval: tuple[float, float]
    """90%"""
    calibration: str | None = None
    """Version of the calibration that corrects it; None: the cost model alone."""
    num_gpus: int
    price_per_gpu_hour: float | None = None
    layout: str = ""
    """The configuration that is predicted, in words: a query may leave it open."""
    samples: float | None = None
    """Sequences of the predicted step; None: a job whose batch is reported is compared all the
    same.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The median step time of a stretch of steps; of a job that reports its batch, of a step of the
    newest size.
    """

    step_s: float
    interval: tuple[float, float]
    """90%, of the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How much slower the job is now, against what it was."""

    factor: float
    """1.1: a step takes 10% longer."""
    interval: tuple[float, float]
    """90%"""
    since_step: int
    """First step that is slower, by the trainer's number where it gives one."""
    told_step: int
    """The step after which it could be told."""
    shape: Shape
    """`recurring`: some steps are slower, again and again, and the factor is that of the mean
    step.
    """
    period: int | None = None
    """Of `recurring`: every so many steps one is slow; None for bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How much slower the job is than it should be."""

    factor: float
    interval: tuple[float, float]
    """90%, of the job's median and of the expectation together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What could explain a slowdown."""

    kind: CauseKind
    ranks: tuple[int, ...] = ()
    """Of `some_ranks`: those that lag, the slowest first."""
    hosts: tuple[str, ...] = ()
    part: str | None = None
    share: float | None = None
    """Of the longer step, the share that this part grew by."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a slowdown takes from every day that it lasts."""

    hours: float
    """Of work that the job would have done at its old pace."""
    gpu_hours: float | None = None
    cost: float | None = None
    """US dollars; None without a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to be said of a job after its newest step."""

    status: Status
    steps: int
    """Steps seen."""
    dropped: int = 0
    """Steps that reporters could not keep."""
    ranks: int = 1
    """Processes that reported."""
    now: Pace | None = None
    """None while the first steps are learnt, and where a log without a query has rates alone."""
    was: Pace | None = None
    """The fastest steady pace before; None where there is no other."""
    expected: Expected | None = None
    slowdown: Slowdown | None = None
    lag: Lag | None = None
    causes: tuple[Cause, ...] = ()
    loss_per_day: Loss | None = None
    text: tuple[str, ...] = ()
    """The same in sentences; empty where all is well."""

    @property
    def slow(self) -> bool:
        """Whether there is something to tell."""
        return self.status in ("slower_than_it_was", "slower_than_it_should_be")
