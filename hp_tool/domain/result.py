"""Results of training queries; their JSON has the fields of these dataclasses."""

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from hp_tool.domain.familiarity import Familiarity
from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.fit import Fit
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.parts import MEMORY_KEYS
from hp_tool.domain.prices import Priced
from hp_tool.domain.units import SECONDS_PER_HOUR, format_duration, format_gib

Against = Literal["memory", "gpus"]
"""Objective that a Pareto front of trainings compares with step time."""
Front = Against | Literal["throughput"]
"""Objective that a Pareto front compares with step time, or for serving with the tokens per second
of a user.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a configuration is illegal or does not fit."""

    code: str
    message: str
    needed: float | None = None
    available: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the worst pipeline stage; the seven parts from weights to overhead sum to
    total_bytes. Parts, total and capacity count allocated bytes, because the allocator releases
    cached blocks before it fails.
    """

    total_bytes: float
    """Bytes that must fit: allocated_bytes + overhead_bytes."""
    capacity_bytes: float
    """Device memory x (1 - headroom)."""
    worst_stage: int
    """Index of the stage, 0-based."""
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    """Bytes saved for the backward pass, for all micro-batches in flight."""
    logits_bytes: float
    buffers_bytes: float
    """Bytes of one layer's working set, gathered inputs and communication buckets."""
    overhead_bytes: float
    """Bytes outside the framework's allocator: CUDA context, NCCL."""
    layer_activations_bytes: float
    """The transformer layers' share of activations_bytes."""
    allocated_bytes: float
    """total_bytes - overhead_bytes, as torch.cuda.max_memory_allocated() reports it."""
    reserved_bytes: float
    """Bytes that torch.cuda.max_memory_reserved() reports if there is room: allocated_bytes and
    cached blocks.
    """
    device_bytes: float | None = None
    """Memory of the whole device in bytes, including headroom."""
    host_bytes: float = 0.0
    """Bytes offloaded to host memory, the maximum over the ranks; not part of total_bytes."""

    @property
    def parts_bytes(self) -> dict[str, float]:
        """Bytes by part, which sum to total_bytes."""
        return {name: getattr(self, f"{name}_bytes") for name in MEMORY_KEYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Seconds of one optimizer step; parts_s has exposed seconds, which sum to step_s."""

    step_s: float
    parts_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Ranges that contain the true value with the stated confidence."""

    confidence: float
    step_s: tuple[float, float]
    memory_total_bytes: tuple[float, float]
    """Allocated memory plus memory outside the allocator; determines the probability of running out
    of memory.
    """
    memory_reserved_bytes: tuple[float, float] | None = None
    """Memory that a monitor of the device shows. The upper end includes blocks that the allocator
    caches and releases before it fails. None if measurements on this cluster, which are of
    allocated memory, correct the estimate.
    """
    source: str
    """The measurements from which the widths come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowest:
    """The omitted setting whose value would narrow the interval of the step time most."""

    set: ChosenValues
    """Values to add to the query, by path: training.framework_version."""
    step_s: tuple[float, float]
    """Interval of the step time with these values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithRecipe:
    """The step time with the current recipe, for a query that names none."""

    recipe: str
    set: dict[str, Any]
    """Values to add to the query, by path: training.recipe, and replacements for settings of the
    recipe that this layout cannot use.
    """
    step_s: float
    interval_s: tuple[float, float]
    """90% interval of step_s."""
    feasible: bool
    changes: dict[str, Any]
    """Settings by path that the recipe sets to other values than the open query has."""
    gains: dict[str, float]
    """For settings that change the trained numbers: step time without each, divided by step_s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A small change that makes an infeasible configuration feasible, with its effects."""

    change: str
    """The change in words, such as `TP 4 -> 8 (DP 16 -> 8)`, with its consequences in brackets."""
    changed: tuple[str, ...]
    """Fields of parallel that differ from the requested configuration."""
    parallel: ParallelConfig
    """The complete fixed configuration; valid input."""
    set: ChosenValues = field(default_factory=dict)
    """Query values besides `parallel` that the fix requires, by path: training.gradient_precision,
    cluster.num_gpus.
    """
    num_gpus: int
    """Number of devices; larger than the query's if the change says so."""
    memory_total_bytes: float
    """Bytes on its worst stage."""
    out_of_memory_probability: float | None = None
    fit: Fit | None = None
    """How it fits, in a word, from its memory."""
    memory_saved_bytes: float | None = None
    """Bytes of the requested configuration minus those of the fix, each on its worst stage; None if
    the requested one is illegal and has no size.
    """
    step_s: float
    step_change_fraction: float | None = None
    """Relative change of the step time, such as 0.03 for 3% longer; None if the requested
    configuration is illegal.
    """
    days: float | None = None
    cost: float | None = None
    """US dollars."""
    remaining: tuple[Reason, ...] = ()
    """Targets that it still misses, if no change meets them and this is the best found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Fraction of calendar time that trains despite failures."""

    fraction: float
    mtbf_s: float
    """Mean time between failures of the whole job, in seconds."""
    checkpoint_bytes: float
    checkpoint_s: float
    checkpoint_interval_s: float
    young_interval_s: float
    """Young's first-order optimum of the interval, sqrt(2 checkpoint_s mtbf_s), for comparison."""
    restart_s: float
    source: str
    """Source of the figures that the query omits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Prediction for one training configuration. Memory and time are None only if the configuration
    is illegal.
    """

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    parallel: ParallelConfig | None = None
    """The resolved configuration, including data_parallel_size."""
    memory: MemoryEstimate | None = None
    time: TimeEstimate | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    """Model FLOPs as a fraction of peak, by the convention in provenance.flops_convention (default:
    full attention).
    """
    hfu: float | None = None
    """The same including the FLOPs that recomputation repeats."""
    mfu_causal: float | None = None
    """mfu counting only the half of the scores that a causal mask keeps; about half as large at
    long contexts.
    """
    hfu_causal: float | None = None
    hfu_paper: float | None = None
    intervals: Intervals | None = None
    familiarity: Familiarity | None = None
    """How similar the nearest measured runs are; determines the width of the intervals."""
    narrowest: Narrowest | None = None
    """None if no omitted setting widens the interval of the step time by more than a tenth."""
    with_recipe: WithRecipe | None = None
    """None if the query names a recipe, or there is none for its framework and devices."""
    out_of_memory_probability: float | None = None
    """Probability that it needs more than the whole device, from the interval of its memory; 0 if a
    run of it succeeded.
    """
    fit: Fit | None = None
    """How it fits, in a word, from that probability."""
    days: float | None = None
    """Days of uninterrupted training."""
    effective_days: float | None = None
    """Calendar days, days / goodput.fraction; None without training.reliability."""
    goodput: Goodput | None = None
    gpu_hours: float | None = None
    """GPU-hours of the calendar days, like cost; of `days` without training.reliability."""
    cost: float | None = None
    """US dollars."""
    energy: float | None = None
    """Joules of the whole training, without interruptions."""
    co2_kg: float | None = None
    """kg of CO2 equivalent of that energy; None without cluster.grid_carbon_kg_per_kwh."""
    fixes: tuple[Fix, ...] = ()
    """Fixes of an infeasible training configuration: the smallest changes that make it feasible,
    fastest first.
    """
    provenance: dict[str, object] = field(default_factory=dict)
    """Origin of the numbers: model, GPU and efficiency profile, FLOPs convention, version."""

    def __repr__(self) -> str:
        """Return a one-line summary."""
        verdict = (
            "feasible"
            if self.feasible
            else f"infeasible ({', '.join(reason.code for reason in self.reasons)})"
        )
        if self.time is None or self.memory is None:
            return f"<Estimate: {verdict}>"
        return (
            f"<Estimate: {verdict}, step {format_duration(self.time.step_s)}, "
            f"{format_gib(self.memory.total_bytes)}>"
        )

    @property
    def calendar_days(self) -> float | None:
        """effective_days if failures are counted, else days."""
        return self.days if self.effective_days is None else self.effective_days


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster:
    """A layout that the cost model predicts to be faster than rank 1 and that has features which no
    measured run has.
    """

    parallel: ParallelConfig
    set: ChosenValues = field(default_factory=dict)
    """Chosen query values, as in Recommendation."""
    unmeasured: tuple[str, ...]
    """These features, as fields of the query."""
    expected_step_s: float
    gain_fraction: float
    """Relative gain, such as 0.03 if its expected step is 3% shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation(Priced):
    """One row of a ranking."""

    rank: int
    parallel: ParallelConfig
    set: ChosenValues = field(default_factory=dict)
    """Query values that the ranking chose besides `parallel`, by path: training.offload, one of a
    list under training, cluster.num_gpus. The query with both gives this estimate.
    """
    estimate: Estimate
    group: int | None = None
    """recommend: group of tied rows. Rows are in group 1 if the 90% interval of the ratio of their
    step time to the best contains 1; the first slower row starts group 2, and so on.
    """
    out_of_memory_probability: float | None = None
    """Probability of its estimate, calibrated if possible."""
    expected_step_s: float | None = None
    """Step time divided by the probability that the run does not run out of memory, because such a
    run trains nothing.
    """
    faster: Faster | None = None
    """For rank 1: the fastest layout, if it is not rank 1 only because nobody measured its
    features.
    """
    measurement: Measurement | None = None
    measured_range_s: tuple[float, float] | None = None
    """Step times in seconds of its fastest and slowest complete run, if several succeeded;
    `measurement` represents them.
    """
    calibrated_estimate: Estimate | None = None

    @property
    def preferred_estimate(self) -> Estimate:
        """The calibrated estimate if there is one, else the estimate."""
        return self.calibrated_estimate or self.estimate

    @property
    def expected_token_s(self) -> float | None:
        """Expected seconds per token, which makes steps of different batches comparable."""
        known = self.preferred_estimate
        if self.expected_step_s is None or known.time is None or not known.tokens_per_second:
            return self.expected_step_s
        return self.expected_step_s / (known.tokens_per_second * known.time.step_s)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """US dollars per million trained tokens; None without a price, or if the number of days is
        known.
        """
        rate = self.preferred_estimate.tokens_per_second_per_gpu
        if self.price is None or self.preferred_estimate.calendar_days is not None or not rate:
            return None
        return self.price / SECONDS_PER_HOUR / rate * 1e6

    def __repr__(self) -> str:
        return f"<Recommendation {self.rank}: {self.parallel!r}, {self.preferred_estimate!r}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSummary:
    """Numbers of candidates of a query's space."""

    legal: int
    """Candidates whose memory and time were computed."""
    feasible: int
    """Feasible candidates among these."""
    pruned: int = 0
    """Further legal candidates that lower bounds excluded without computing them."""
    seconds: float
    """Seconds to enumerate, cost and rank them."""


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking(Generic[Row]):
    """The best configurations of a space, best first, with the size of the space and the reasons
    for rejections.
    """

    recommendations: tuple[Row, ...] = ()
    space: SpaceSummary = SpaceSummary(legal=0, feasible=0, seconds=0.0)
    rejections: dict[str, int] = field(default_factory=dict)
    """Number of candidates rejected by each reason."""
    groups: tuple[int, ...] = ()
    """Number of layouts in each group, up to the last that is shown."""
    nearest_misses: tuple[Row, ...] = ()
    """If nothing is acceptable (also at one of several rates): the nearest misses, each infeasible
    with its reasons.
    """
