"""Serving: a configuration of an inference engine, and what an estimate of it says."""

from dataclasses import dataclass, field
from typing import ClassVar

from hp_tool.domain.familiarity import Familiarity
from hp_tool.domain.fields import ChosenValues, Strict, short_repr
from hp_tool.domain.measurement import Measurement, Tails
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.parts import SERVING_MEMORY_KEYS
from hp_tool.domain.prices import Priced
from hp_tool.domain.result import Reason
from hp_tool.domain.units import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig(Strict):
    """One way to serve a model, fully resolved. Replicas are num_gpus / (tensor x pipeline x
    attention data).
    """

    tensor_parallel_size: int = 1
    """Devices that split each attention head group and dense MLP (t)."""
    pipeline_parallel_size: int = 1
    """Stages (p)."""
    expert_parallel_size: int = 1
    """Devices of a stage that hold different experts (e); the rest of the stage splits each
    expert's matrices.
    """
    attention_data_parallel_size: int = 1
    """Groups of a stage that attend to different requests but share the experts (d)."""
    redundant_experts: int = 0
    """Second copies of experts beside the model's own, over the e ranks."""
    data_parallel_size: int = 1
    """num_gpus / (tensor x pipeline): replicas x attention_data_parallel_size."""
    max_num_seqs: int = 256
    """Requests one scheduler runs at once."""
    max_num_batched_tokens: int = 8192
    """Tokens of one forward pass, decoding and prefill chunks together."""

    __repr__ = short_repr


RunConfig = ParallelConfig | ServingConfig
"""What a run of a search tries: a way to train, or a way to serve."""
RUN_CONFIGS: dict[str, type[ParallelConfig | ServingConfig]] = {
    "training": ParallelConfig,
    "inference": ServingConfig,
}
"""The configurations of each kind of query."""


def config_query(config: RunConfig) -> ParallelQuery:
    """Return the `parallel` of a query that describes exactly this configuration."""
    return ParallelQuery(**{name: getattr(config, name) for name in type(config).__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Bytes on one device of the fullest stage; the parts sum to total_bytes."""

    total_bytes: float
    """With the KV cache the load asks for, at most what there is."""
    capacity_bytes: float
    """What the engine may take of the device."""
    worst_stage: int = 0
    """0-based; the first is as full as any: no other has more layers, and it holds the
    embedding.
    """
    weights_bytes: float
    kv_cache_bytes: float
    """Keys and values of the requests that run at once."""
    activations_bytes: float
    """Working set of one forward pass."""
    logits_bytes: float
    overhead_bytes: float
    """Engine reserve."""
    kv_cache_capacity_bytes: float
    """Left for keys and values after everything else."""

    @property
    def parts_bytes(self) -> dict[str, float]:
        """Bytes by part, which sum to total_bytes."""
        return {name: getattr(self, f"{name}_bytes") for name in SERVING_MEMORY_KEYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTokens:
    """A number of tokens, and the ends of its 90% interval."""

    low: int
    expected: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The cache of one replica before any request."""

    tokens: CacheTokens
    """Tokens of requests of max_context tokens. Windows and recurrent states take the same from
    short requests as from long ones, so that fewer tokens of short requests fit.
    """
    bytes_per_device: float
    max_context: int
    """Tokens of the longest request, prompt and answer: what the model knows positions for, or what
    fits.
    """
    requests: int
    """Whole requests of the load that the cache holds."""
    alike: bool = True
    """Whether all layers cache every token; else fewer tokens of shorter requests fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGoodput:
    """Requests that keep to every bound of the targets, of a request: the tightest of a latency's
    targets on quantiles, or, where none is named, the mean's.
    """

    fraction: float
    """Of all requests."""
    requests_per_second_per_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingIntervals:
    """Ranges that should hold the measured mean with the stated confidence."""

    confidence: float
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    output_tokens_per_second_per_gpu: tuple[float, float]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFix:
    """A small change that makes an infeasible serving configuration feasible, and what it gives."""

    change: str
    """In words, such as `TP 4 -> 8 (DP 2 -> 1)`; what follows from the change stands in
    brackets.
    """
    changed: tuple[str, ...]
    """Fields of parallel that differ from the configuration asked for."""
    parallel: ServingConfig
    """All of the mended configuration: valid input."""
    set: ChosenValues = field(default_factory=dict)
    """Values that the query must have beside `parallel`, by path: cluster.num_gpus."""
    num_gpus: int
    """Devices it runs on; more than the query has where the change says so."""
    memory_total_bytes: float
    ttft_s: float
    tpot_s: float
    request_latency_s: float
    output_tokens_per_second_per_gpu: float
    throughput_change_fraction: float | None = None
    """0.03: 3% more tokens per second and GPU than what was asked for; None where that has no
    throughput.
    """
    remaining: tuple[Reason, ...] = ()
    """Targets that it misses too: the nearest that was found is told where no change meets them."""
    fit: ClassVar[None] = None
    """Of trainings alone, as the next."""
    out_of_memory_probability: ClassVar[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """US dollars per million tokens. A request's prompt and answer together cost the devices' time
    that it takes.
    """

    input: float
    """Prompt tokens, cached ones included, by the time that prefill takes."""
    output: float
    """By the time that decoding takes."""


ALL_RUN_FRACTION = 0.99
"""Share of the requests in flight from which all of them are said to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceEstimate:
    """A prediction for one serving configuration under one load. Means over requests unless named
    otherwise.
    """

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    parallel: ServingConfig | None = None
    replicas: int | None = None
    memory: ServingMemory | None = None
    kv_cache: KvCache | None = None
    ttft_s: float | None = None
    """Time to first token, queueing included."""
    tpot_s: float | None = None
    """Time per output token after the first."""
    request_latency_s: float | None = None
    """ttft_s + (output_length - 1) tpot_s."""
    parts_s: dict[str, float] | None = None
    """Where request_latency_s goes; parts sum to it."""
    output_tokens_per_second_per_gpu: float | None = None
    output_tokens_per_second_per_user: float | None = None
    """1 / tpot_s."""
    request_rate_per_second: float | None = None
    """Requests completed a second, all replicas together."""
    concurrency: int | float | None = None
    """Requests in flight over all GPUs: the load's, the highest within the targets where it gives
    none, or at a rate the mean (Little's law).
    """
    users: int | None = None
    """People who keep that up, each with one request at a time and inference.think_time_s between
    two: concurrency + rate x think time.
    """
    max_concurrency: int | None = None
    """Requests that can run at once over all GPUs: memory or max_num_seqs, whichever is less."""
    max_concurrency_without_preemption: int | None = None
    """Of those, requests that have room to their last token even if all are at it. Between this and
    max_concurrency requests of mixed ages fit; where ages meet, the engine puts some back into the
    queue and computes them again.
    """
    running_requests: float | None = None
    """Requests that do run at once, the rest of the concurrency waits."""
    expert_imbalance: float | None = None
    """Expected load of the busiest of the ranks that divide the experts, over the mean, while
    decoding.
    """
    preemptions_per_request: float | None = None
    """How often a full cache put a request back, to be computed again; of traces, which are played
    event by event.
    """
    kv_cache_limited: bool | None = None
    """Whether memory for keys and values, not the load, bounds running_requests."""
    cost_per_million_output_tokens: float | None = None
    """US dollars, all of the devices' time charged to the output."""
    cost_per_million_tokens: TokenPrices | None = None
    """The same time divided between input and output."""
    tails: Tails | None = None
    goodput: ServingGoodput | None = None
    """None without targets."""
    highest_load: float | None = None
    """Where the query's load is too high: the highest that is not, in requests in flight or a
    second as the query counts. None in batches, and where no load is low enough.
    """
    fixes: tuple[ServingFix, ...] = ()
    """What would make an infeasible configuration feasible; none in batches and recommendations."""
    intervals: ServingIntervals | None = None
    familiarity: Familiarity | None = None
    """How near the nearest measured runs are, on which the width of the intervals depends."""
    provenance: dict[str, object] = field(default_factory=dict)
    fit: ClassVar[None] = None
    """Of trainings alone, as the next."""
    out_of_memory_probability: ClassVar[None] = None

    @property
    def some_wait(self) -> bool:
        """Whether clearly fewer requests run than are in flight."""
        running, flying = self.running_requests, self.concurrency
        return bool(running and flying and running < ALL_RUN_FRACTION * flying)

    def __repr__(self) -> str:
        """A line for people; the fields are those of --json."""
        verdict = (
            "feasible"
            if self.feasible
            else f"infeasible ({', '.join(reason.code for reason in self.reasons)})"
        )
        if (
            self.ttft_s is None
            or self.tpot_s is None
            or self.output_tokens_per_second_per_gpu is None
        ):
            return f"<InferenceEstimate: {verdict}>"
        latencies = f"TTFT {format_duration(self.ttft_s)}, TPOT {format_duration(self.tpot_s)}"
        return (
            f"<InferenceEstimate: {verdict}, {latencies}, "
            f"{self.output_tokens_per_second_per_gpu:,.0f} tokens/s/GPU>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRecommendation(Priced):
    """One row of the answer, best first."""

    rank: int
    group: int | None = None
    """Rows of one group cannot be told apart by the 90% interval of the ratio of what ranks them;
    1 holds the best. None: rows that are not ranked by a prediction.
    """
    parallel: ServingConfig
    set: ChosenValues = field(default_factory=dict)
    """Values that the ranking chose beside `parallel`, by path: cluster.num_gpus, the load of a
    front's row.
    """
    estimate: InferenceEstimate
    measurement: Measurement | None = None
    """Of one replica, where a search ran it."""
    calibrated_estimate: InferenceEstimate | None = None
    """After what was measured on this cluster; a measured configuration's own latencies."""

    @property
    def preferred_estimate(self) -> InferenceEstimate:
        """The calibrated estimate if there is one, else the estimate."""
        return self.calibrated_estimate or self.estimate

    def __repr__(self) -> str:
        return (
            f"<ServingRecommendation {self.rank}: {self.parallel!r}, {self.preferred_estimate!r}>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(Strict):
    """Replicas that are alike."""

    gpu: str
    tensor_parallel_size: int
    expert_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    redundant_experts: int = 0
    replicas: int
    """Each of tensor x attention data parallel devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEstimate:
    """A prediction for a pair of pools under one load. Means over requests."""

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    ttft_s: float
    """Waiting for prefill, prefill, and the transfer of keys and values."""
    tpot_s: float
    request_latency_s: float
    transfer_s: float
    """Of one prompt's keys and values; within ttft_s."""
    request_rate_per_second: float
    concurrency: int | float
    """Requests in flight, and the people who keep them up: as InferenceEstimate's."""
    users: int
    output_tokens_per_second_per_gpu: float
    """By the devices of both pools."""
    num_gpus: int
    prefill_tokens_per_second_per_gpu: float
    """Prompt tokens, cached ones included, by the devices of the prefill pool."""
    decode_tokens_per_second_per_gpu: float
    """Output tokens by the devices of the decoding pool."""
    prefill_busy: float
    """Share of the time that a prefill replica works: near 1 it bounds the rate."""
    decode_batch: float
    """Requests that a decoding replica serves at once."""
    max_decode_batch: float
    """The most it has room for."""
    intervals: ServingIntervals
    familiarity: Familiarity | None = None
    """How near the nearest measured runs are, as InferenceEstimate's."""
    tails: Tails | None = None
    """Of single requests: by their wait for prefill, and at a rate by the load of decoding."""
    cost_per_million_output_tokens: float | None = None
    """US dollars."""
    provenance: dict[str, object] = field(default_factory=dict)
    """The release whose constants were used, and the precision of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecommendation:
    """One pair of pools, best first."""

    rank: int
    prefill: PoolConfig
    decode: PoolConfig
    estimate: PoolEstimate
