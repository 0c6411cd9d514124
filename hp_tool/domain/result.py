"""What comes back: typed results whose JSON is exactly these fields."""

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
"""What a front of trainings sets against step time."""
Front = Against | Literal["throughput"]
"""What a Pareto front may set against step time, or for serving against the tokens per second of a
user.
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
    total_bytes. Parts, total and capacity count what is allocated; the allocator gives blocks that
    it holds free back before it fails.
    """

    total_bytes: float
    """What must fit: allocated_bytes and overhead_bytes."""
    capacity_bytes: float
    """Device memory x (1 - headroom)."""
    worst_stage: int
    """0-based."""
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    """Saved for the backward pass, of all micro-batches in flight."""
    logits_bytes: float
    buffers_bytes: float
    """Working set of one layer, gathered inputs, communication buckets."""
    overhead_bytes: float
    """Outside the framework's allocator: CUDA context, NCCL."""
    layer_activations_bytes: float
    """The transformer layers' share of activations_bytes."""
    allocated_bytes: float
    """total_bytes - overhead_bytes: what torch.cuda.max_memory_allocated() reports."""
    reserved_bytes: float
    """What torch.cuda.max_memory_reserved() reports where there is room for it: allocated_bytes and
    free blocks.
    """
    device_bytes: float | None = None
    """The whole device's memory, headroom included."""
    host_bytes: float = 0.0
    """Offloaded to host memory, the most of any rank; no part of total_bytes."""

    @property
    def parts_bytes(self) -> dict[str, float]:
        """Bytes by part, which sum to total_bytes."""
        return {name: getattr(self, f"{name}_bytes") for name in MEMORY_KEYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Seconds of one optimizer step; parts_s holds exposed seconds and sums to step_s."""

    step_s: float
    parts_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Ranges that should hold the truth with the stated confidence."""

    confidence: float
    step_s: tuple[float, float]
    memory_total_bytes: tuple[float, float]
    """What is allocated, with what lies outside the allocator: the chance of running out of memory
    is of this interval.
    """
    memory_reserved_bytes: tuple[float, float] | None = None
    """What a monitor of the device shows: its top counts blocks too that the allocator holds in
    reserve, and gives back before it fails. None where measurements on this cluster, which are of
    allocated memory, correct the estimate.
    """
    source: str
    """Which measurements the widths come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowest:
    """What a query leaves unsaid whose naming narrows the interval of its step time most."""

    set: ChosenValues
    """Values to put into the query, by path: training.framework_version."""
    step_s: tuple[float, float]
    """The interval of the query with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithRecipe:
    """What today's recipe gives a query that names none."""

    recipe: str
    set: dict[str, Any]
    """Values to put into the query, by path: training.recipe, and what the recipe's own layout has
    and this one cannot run.
    """
    step_s: float
    interval_s: tuple[float, float]
    """90% interval of step_s."""
    feasible: bool
    changes: dict[str, Any]
    """Knobs by path that the recipe sets otherwise than they are left open."""
    gains: dict[str, float]
    """Of those that change the numbers that are trained: step time without each, over step_s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A small change that makes an infeasible configuration feasible, with its price."""

    change: str
    """In words, such as `TP 4 -> 8 (DP 16 -> 8)`; what follows from the change stands in
    brackets.
    """
    changed: tuple[str, ...]
    """Fields of parallel that differ from the configuration asked for."""
    parallel: ParallelConfig
    """All of the mended configuration: valid input."""
    set: ChosenValues = field(default_factory=dict)
    """Values that the query must have beside `parallel`, by path: training.gradient_precision,
    cluster.num_gpus.
    """
    num_gpus: int
    """Devices it runs on; more than the query has where the change says so."""
    memory_total_bytes: float
    """On its worst stage."""
    out_of_memory_probability: float | None = None
    fit: Fit | None = None
    """In a word, from that."""
    memory_saved_bytes: float | None = None
    """What was asked for less this, each on its own worst stage; None where that is illegal and has
    no size.
    """
    step_s: float
    step_change_fraction: float | None = None
    """0.03: a step takes 3% longer than what was asked for; None where that is illegal."""
    days: float | None = None
    cost: float | None = None
    """US dollars."""
    remaining: tuple[Reason, ...] = ()
    """Targets that it misses too: the best that was found is told where no change meets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Training time that survives failures, as a share of the calendar's."""

    fraction: float
    mtbf_s: float
    """Of the whole job."""
    checkpoint_bytes: float
    checkpoint_s: float
    checkpoint_interval_s: float
    young_interval_s: float
    """First-order optimum sqrt(2 C M), for comparison."""
    restart_s: float
    source: str
    """Where the figures that were not given come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A prediction for one configuration. Where it is infeasible, memory and time are still given
    when defined.
    """

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    parallel: ParallelConfig | None = None
    """The resolved configuration, data_parallel_size included."""
    memory: MemoryEstimate | None = None
    time: TimeEstimate | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    """Model FLOPs as a share of peak, by the convention that provenance.flops_convention names
    (default: attention in full).
    """
    hfu: float | None = None
    """The same with the FLOPs that recomputation repeats."""
    mfu_causal: float | None = None
    """mfu with the half of the scores that a causal mask keeps; at long contexts half as large."""
    hfu_causal: float | None = None
    hfu_paper: float | None = None
    intervals: Intervals | None = None
    familiarity: Familiarity | None = None
    """How near the nearest measured runs are, on which the width of the intervals depends."""
    narrowest: Narrowest | None = None
    """None where nothing unsaid widens the interval of step time by more than a tenth."""
    with_recipe: WithRecipe | None = None
    """None where the query names a recipe, or there is none for its framework and devices."""
    out_of_memory_probability: float | None = None
    """That it needs more than the whole device, by the interval of its memory; 0 if a run of it
    worked.
    """
    fit: Fit | None = None
    """Whether it fits in a word, from that probability."""
    days: float | None = None
    """Of uninterrupted training."""
    effective_days: float | None = None
    """Calendar days, days / goodput.fraction; None without training.reliability."""
    goodput: Goodput | None = None
    gpu_hours: float | None = None
    """Of calendar days, like cost; the same as days without training.reliability."""
    cost: float | None = None
    """US dollars."""
    energy: float | None = None
    """Joules of the whole training, uninterrupted."""
    co2_kg: float | None = None
    """kg of CO2 equivalent of that energy; None without cluster.grid_carbon_kg_per_kwh."""
    fixes: tuple[Fix, ...] = ()
    """Of an infeasible training configuration: the smallest changes that fix it, fastest first."""
    provenance: dict[str, object] = field(default_factory=dict)
    """Where the numbers come from: model, GPU and efficiency profile, FLOPs convention, version."""

    def __repr__(self) -> str:
        """A line for people; the fields are those of --json."""
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
        """effective_days where failures are asked for, else days."""
        return self.days if self.effective_days is None else self.effective_days


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster:
    """A layout that is faster than rank 1 by the cost model, with features that no measured run
    has.
    """

    parallel: ParallelConfig
    set: ChosenValues = field(default_factory=dict)
    """As Recommendation's."""
    unmeasured: tuple[str, ...]
    """Those features, as fields of the query."""
    expected_step_s: float
    gain_fraction: float
    """0.03: its expected step is 3% shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation(Priced):
    """One row of the answer, best first."""

    rank: int
    parallel: ParallelConfig
    set: ChosenValues = field(default_factory=dict)
    """Values that the ranking chose beside `parallel`, by path: training.offload, one of a list
    under training, cluster.num_gpus. The query with both gives this estimate.
    """
    estimate: Estimate
    group: int | None = None
    """recommend: 1 for rows that cannot be told apart from the best, whose ratio of step times to
    it has a 90% interval that holds 1; then 2 by the first row that is slower, and so on.
    """
    out_of_memory_probability: float | None = None
    """Its estimate's, calibrated where there is one."""
    expected_step_s: float | None = None
    """Step time over the probability that it runs at all: a run that ends out of memory trains
    nothing.
    """
    faster: Faster | None = None
    """Of rank 1: the fastest layout, if it is not rank 1 because nobody measured its features."""
    measurement: Measurement | None = None
    measured_range_s: tuple[float, float] | None = None
    """Seconds of the fastest and the slowest of its whole runs, where several worked; `measurement`
    is the one that counts.
    """
    calibrated_estimate: Estimate | None = None

    @property
    def preferred_estimate(self) -> Estimate:
        """The calibrated estimate if there is one, else the estimate."""
        return self.calibrated_estimate or self.estimate

    @property
    def expected_token_s(self) -> float | None:
        """Expected seconds for each token, which compares steps of different batches."""
        known = self.preferred_estimate
        if self.expected_step_s is None or known.time is None or not known.tokens_per_second:
            return self.expected_step_s
        return self.expected_step_s / (known.tokens_per_second * known.time.step_s)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """US dollars per million trained tokens; None without a price, or if the days are known."""
        rate = self.preferred_estimate.tokens_per_second_per_gpu
        if self.price is None or self.preferred_estimate.calendar_days is not None or not rate:
            return None
        return self.price / SECONDS_PER_HOUR / rate * 1e6

    def __repr__(self) -> str:
        return f"<Recommendation {self.rank}: {self.parallel!r}, {self.preferred_estimate!r}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSummary:
    """How many candidates there were."""

    legal: int
    """Whose memory and time were computed."""
    feasible: int
    """Of these."""
    pruned: int = 0
    """Legal ones besides, which bounds showed to be no better without computing them."""
    seconds: float
    """Time to enumerate, cost and rank them."""


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking(Generic[Row]):
    """The best configurations of a space, best first; how large the space was, and why the others
    were turned away.
    """

    recommendations: tuple[Row, ...] = ()
    space: SpaceSummary = SpaceSummary(legal=0, feasible=0, seconds=0.0)
    rejections: dict[str, int] = field(default_factory=dict)
    """How many candidates each reason ruled out."""
    groups: tuple[int, ...] = ()
    """How many layouts each group has, up to the last that is shown."""
    nearest_misses: tuple[Row, ...] = ()
    """If nothing is acceptable, or at one of several rates: what lacks least, each infeasible with
    its reasons.
    """
