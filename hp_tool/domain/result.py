"""Results of training queries. Their JSON has the fields of these dataclasses."""

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
"""Second objective of a Pareto front of training layouts, besides step time."""
Front = Against | Literal["throughput"]
"""Second objective of a Pareto front, besides step time or, for serving, tokens per second per
user.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Reason why a configuration is illegal or does not fit."""

    code: str
    message: str
    needed: float | None = None
    available: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the worst pipeline stage. The seven parts from weights to overhead sum to
    total_bytes.

    Parts, total and capacity count allocated bytes, because the allocator releases cached blocks
    before it runs out of memory.
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
    """Part of activations_bytes that belongs to the transformer layers."""
    allocated_bytes: float
    """total_bytes - overhead_bytes, as torch.cuda.max_memory_allocated() reports it."""
    reserved_bytes: float
    """Bytes that torch.cuda.max_memory_reserved() reports if there is room: allocated_bytes and
    cached blocks.
    """
    device_bytes: float | None = None
    """Memory of the whole device in bytes, including headroom."""
    host_bytes: float = 0.0
    """Bytes offloaded to host memory, maximum over all ranks; not part of total_bytes."""

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
    """Ranges that contain the true value with the given confidence."""

    confidence: float
    step_s: tuple[float, float]
    memory_total_bytes: tuple[float, float]
    """Allocated memory plus memory outside the allocator; determines the probability of running out
    of memory.
    """
    memory_reserved_bytes: tuple[float, float] | None = None
    """Memory that a device monitor shows. The upper end includes blocks that the allocator caches
    and releases before it runs out of memory. None if the estimate is corrected by measurements on
    this cluster, because they are of allocated memory.
    """
    source: str
    """Measurements that determine the widths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowest:
    """The omitted setting that would narrow the step-time interval most."""

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
    recipe that the layout does not support.
    """
    step_s: float
    interval_s: tuple[float, float]
    """90% interval of step_s."""
    feasible: bool
    changes: dict[str, Any]
    """Settings, by path, whose value under the recipe differs from that of the query."""
    gains: dict[str, float]
    """For settings that change the numerics: step time without the setting, divided by step_s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A small change that makes an infeasible configuration feasible, with its effects."""

    change: str
    """The change in words, with its consequences in parentheses, such as `TP 4 -> 8 (DP 16 ->
    8)`.
    """
    changed: tuple[str, ...]
    """Fields of `parallel` that differ from the requested configuration."""
    parallel: ParallelConfig
    """The complete fixed configuration; valid input."""
    set: ChosenValues = field(default_factory=dict)
    """Query values other than `parallel` that the fix requires, by path:
    training.gradient_precision, cluster.num_gpus.
    """
    num_gpus: int
    """Number of devices. It exceeds that of the query only if the change includes it."""
    memory_total_bytes: float
    """Bytes on the worst stage."""
    out_of_memory_probability: float | None = None
    fit: Fit | None = None
    """How well the fix fits in memory, as a fit class."""
    memory_saved_bytes: float | None = None
    """Bytes of the requested configuration minus those of the fix, each on its worst stage; None if
    the requested configuration is illegal, because its size is unknown.
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
    """Targets that the fix still misses, if no change meets them and this one comes nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Fraction of calendar time that is spent training despite failures."""

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
    """Prediction for one training configuration. Memory and time are None only for illegal
    configurations.
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
    """The same, including FLOPs repeated by recomputation."""
    mfu_causal: float | None = None
    """As `mfu`, but counting only the half of the attention scores that a causal mask keeps. It is
    about half of `mfu` for long contexts.
    """
    hfu_causal: float | None = None
    hfu_paper: float | None = None
    intervals: Intervals | None = None
    familiarity: Familiarity | None = None
    """How similar the nearest measured runs are, which determines the interval widths."""
    narrowest: Narrowest | None = None
    """None if no omitted setting widens the interval of the step time by more than a tenth."""
    with_recipe: WithRecipe | None = None
    """None if the query names a recipe, or there is none for its framework and devices."""
    out_of_memory_probability: float | None = None
    """Probability that the configuration needs more memory than the device has, from its memory
    interval; 0 if it already ran successfully.
    """
    fit: Fit | None = None
    """How well the configuration fits in memory, as a fit class derived from that probability."""
    days: float | None = None
    """Days of uninterrupted training."""
    effective_days: float | None = None
    """Calendar days, days / goodput.fraction; None without training.reliability."""
    goodput: Goodput | None = None
    gpu_hours: float | None = None
    """GPU-hours of the calendar days, as for cost; without training.reliability, of `days`."""
    cost: float | None = None
    """US dollars."""
    energy: float | None = None
    """Energy in joules of the whole training run, without interruptions."""
    co2_kg: float | None = None
    """kg of CO2 equivalent of that energy; None without cluster.grid_carbon_kg_per_kwh."""
    fixes: tuple[Fix, ...] = ()
    """Fixes for an infeasible configuration: the smallest changes that make it feasible, fastest
    first.
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
    """A layout with a shorter predicted step than rank 1 and with features that no measured run
    has.
    """

    parallel: ParallelConfig
    set: ChosenValues = field(default_factory=dict)
    """Chosen query values, as in Recommendation."""
    unmeasured: tuple[str, ...]
    """Features that no measured run has, as query fields."""
    expected_step_s: float
    gain_fraction: float
    """Relative gain, such as 0.03 for an expected step time that is 3% shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation(Priced):
    """One row of a ranking."""

    rank: int
    parallel: ParallelConfig
    set: ChosenValues = field(default_factory=dict)
    """Query values other than `parallel` that the ranking chose, by path: training.offload, a value
    from a list under training, cluster.num_gpus. The query with `parallel` and these values gives
    this estimate.
    """
    estimate: Estimate
    group: int | None = None
    """recommend: group of tied rows. A row is in group 1 if the 90% interval of the ratio of its
    step time to the best one contains 1. The first slower row starts group 2, and so on.
    """
    out_of_memory_probability: float | None = None
    """Probability of running out of memory, from the calibrated estimate if there is one."""
    expected_step_s: float | None = None
    """Step time divided by the probability that the run does not run out of memory, because a run
    that does trains nothing.
    """
    faster: Faster | None = None
    """For rank 1: the fastest layout, if it is not rank 1 only because no measured run has its
    features.
    """
    measurement: Measurement | None = None
    measured_range_s: tuple[float, float] | None = None
    """Step times in seconds of the fastest and the slowest complete run, if several succeeded.
    `measurement` represents these runs.
    """
    calibrated_estimate: Estimate | None = None

    @property
    def preferred_estimate(self) -> Estimate:
        """The calibrated estimate if there is one, else the estimate."""
        return self.calibrated_estimate or self.estimate

    @property
    def expected_token_s(self) -> float | None:
        """Expected seconds per token, for comparing steps with different batch sizes."""
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
    """Numbers of candidates in a query's space."""

    legal: int
    """Candidates whose memory and time were computed."""
    feasible: int
    """Number of feasible candidates among the legal ones."""
    pruned: int = 0
    """Number of further legal candidates, which lower bounds excluded without computing them."""
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
    """Number of layouts in each group, up to the last group shown."""
    nearest_misses: tuple[Row, ...] = ()
    """Nearest misses if no configuration is acceptable, or none at one of several request rates.
    Each is infeasible and has reasons.
    """
