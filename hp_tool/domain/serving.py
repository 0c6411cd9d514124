"""Serving: a configuration of an inference engine, and its estimate."""

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
    """A fully resolved configuration for serving a model. The number of replicas is num_gpus /
    (tensor x pipeline x attention data).
    """

    tensor_parallel_size: int = 1
    """Devices that split each attention head group and dense MLP (t)."""
    pipeline_parallel_size: int = 1
    """Pipeline stages (p)."""
    expert_parallel_size: int = 1
    """Devices of a stage that have different experts (e); the other devices of the stage split each
    expert's matrices.
    """
    attention_data_parallel_size: int = 1
    """Groups of a stage that attend to different requests and share the experts (d)."""
    redundant_experts: int = 0
    """Additional copies of experts over the e ranks."""
    data_parallel_size: int = 1
    """num_gpus / (tensor x pipeline): replicas x attention_data_parallel_size."""
    max_num_seqs: int = 256
    """Maximum number of requests that one scheduler runs at once."""
    max_num_batched_tokens: int = 8192
    """Maximum number of tokens of one forward pass, decoding and prefill chunks together."""

    __repr__ = short_repr


RunConfig = ParallelConfig | ServingConfig
"""Configuration of a search's run: for training or for serving."""
RUN_CONFIGS: dict[str, type[ParallelConfig | ServingConfig]] = {
    "training": ParallelConfig,
    "inference": ServingConfig,
}
"""Type of configuration by kind of query."""


def config_query(config: RunConfig) -> ParallelQuery:
    """Return the `parallel` of a query that describes exactly this configuration."""
    return ParallelQuery(**{name: getattr(config, name) for name in type(config).__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Bytes on one device of the fullest stage; the parts sum to total_bytes."""

    total_bytes: float
    """Bytes including the KV cache that the load requires, limited to the available cache."""
    capacity_bytes: float
    """Bytes of the device that the engine may use."""
    worst_stage: int = 0
    """Index of the stage, 0-based. The first is as full as any: no other has more layers, and it
    has the embedding.
    """
    weights_bytes: float
    kv_cache_bytes: float
    """Bytes of keys and values of the requests that run at once."""
    activations_bytes: float
    """Working set of one forward pass."""
    logits_bytes: float
    overhead_bytes: float
    """Bytes that the engine reserves."""
    kv_cache_capacity_bytes: float
    """Bytes available for keys and values."""

    @property
    def parts_bytes(self) -> dict[str, float]:
        """Bytes by part, which sum to total_bytes."""
        return {name: getattr(self, f"{name}_bytes") for name in SERVING_MEMORY_KEYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTokens:
    """A number of tokens, with its 90% interval."""

    low: int
    expected: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The empty cache of one replica."""

    tokens: CacheTokens
    """Capacity in tokens of requests with max_context tokens. Windows and recurrent states use the
    same amount for short requests, so fewer tokens of short requests fit.
    """
    bytes_per_device: float
    max_context: int
    """Maximum tokens of a request, prompt and answer: the model's positions, or what fits."""
    requests: int
    """Number of the load's complete requests that fit in the cache."""
    alike: bool = True
    """Whether all layers cache every token; otherwise fewer tokens of shorter requests fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGoodput:
    """Requests that meet every bound of the targets on a single request.

    The bound of a latency is its tightest target on a quantile, or its target on the mean if there
    is none.
    """

    fraction: float
    """Fraction of all requests."""
    requests_per_second_per_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingIntervals:
    """Ranges that contain the measured mean with the stated confidence."""

    confidence: float
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    output_tokens_per_second_per_gpu: tuple[float, float]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFix:
    """A small change that makes an infeasible serving configuration feasible, and its effect."""

    change: str
    """The change in words, such as `TP 4 -> 8 (DP 2 -> 1)`, with its consequences in brackets."""
    changed: tuple[str, ...]
    """Fields of parallel that differ from the requested configuration."""
    parallel: ServingConfig
    """The complete fixed configuration; valid input."""
    set: ChosenValues = field(default_factory=dict)
    """Query values besides `parallel` that the fix requires, by path: cluster.num_gpus."""
    num_gpus: int
    """Number of devices; larger than the query's if the change says so."""
    memory_total_bytes: float
    ttft_s: float
    tpot_s: float
    request_latency_s: float
    output_tokens_per_second_per_gpu: float
    throughput_change_fraction: float | None = None
    """Relative change of the tokens per second and GPU, such as 0.03 for 3% more; None if the
    requested configuration has no throughput.
    """
    remaining: tuple[Reason, ...] = ()
    """Targets that it still misses, if no change meets them and this is the nearest found."""
    fit: ClassVar[None] = None
    """Only trainings have this and the next field."""
    out_of_memory_probability: ClassVar[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """US dollars per million tokens. Prompt and answer of a request together cost the device time
    that it takes.
    """

    input: float
    """Price of prompt tokens, including cached ones, by the time of prefill."""
    output: float
    """Price of output tokens, by the time of decoding."""


ALL_RUN_FRACTION = 0.99
"""If at least this fraction of the requests in flight runs, no request counts as waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceEstimate:
    """A prediction for one serving configuration under one load. Figures are means over requests
    unless named otherwise.
    """

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    parallel: ServingConfig | None = None
    replicas: int | None = None
    memory: ServingMemory | None = None
    kv_cache: KvCache | None = None
    ttft_s: float | None = None
    """Time to first token in seconds, including queueing."""
    tpot_s: float | None = None
    """Seconds per output token after the first."""
    request_latency_s: float | None = None
    """ttft_s + (output_length - 1) tpot_s."""
    parts_s: dict[str, float] | None = None
    """Seconds of request_latency_s by part."""
    output_tokens_per_second_per_gpu: float | None = None
    output_tokens_per_second_per_user: float | None = None
    """1 / tpot_s."""
    request_rate_per_second: float | None = None
    """Requests completed per second over all replicas."""
    concurrency: int | float | None = None
    """Requests in flight over all GPUs: the load's, the highest within the targets if the load is
    open, or at a given rate the mean (Little's law).
    """
    users: int | None = None
    """Users who generate the load, each with one request at a time and inference.think_time_s in
    between: concurrency + rate x think time.
    """
    max_concurrency: int | None = None
    """Maximum number of requests running at once over all GPUs, limited by memory or
    max_num_seqs.
    """
    max_concurrency_without_preemption: int | None = None
    """Number of these requests that have room even if all are at their last token. Between this
    number and max_concurrency, requests of mixed ages fit; if their ages coincide, the engine
    preempts some and computes them again.
    """
    running_requests: float | None = None
    """Mean number of running requests; the rest of the concurrency waits."""
    expert_imbalance: float | None = None
    """Expected load of the busiest rank that shares the experts, divided by the mean, during
    decoding.
    """
    preemptions_per_request: float | None = None
    """How often a full cache preempts a request, which is then computed again. Only for traces,
    which are simulated event by event.
    """
    kv_cache_limited: bool | None = None
    """Whether memory for keys and values limits running_requests, rather than the load."""
    cost_per_million_output_tokens: float | None = None
    """US dollars per million output tokens, with all device time charged to the output."""
    cost_per_million_tokens: TokenPrices | None = None
    """US dollars per million tokens, divided between input and output."""
    tails: Tails | None = None
    goodput: ServingGoodput | None = None
    """Requests within their targets; None without targets."""
    highest_load: float | None = None
    """If the query's load is too high: the highest possible one, in requests in flight or per
    second as in the query. None in batches, and if no load is low enough.
    """
    fixes: tuple[ServingFix, ...] = ()
    """Changes that make an infeasible configuration feasible; empty in batches and
    recommendations.
    """
    intervals: ServingIntervals | None = None
    familiarity: Familiarity | None = None
    """How similar the nearest measured runs are; determines the width of the intervals."""
    provenance: dict[str, object] = field(default_factory=dict)
    fit: ClassVar[None] = None
    """Only trainings have this and the next field."""
    out_of_memory_probability: ClassVar[None] = None

    @property
    def some_wait(self) -> bool:
        """Whether less than ALL_RUN_FRACTION of the requests in flight run."""
        running, flying = self.running_requests, self.concurrency
        return bool(running and flying and running < ALL_RUN_FRACTION * flying)

    def __repr__(self) -> str:
        """Return a one-line summary."""
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
    """One row of a ranking, best first."""

    rank: int
    group: int | None = None
    """Group of tied rows, by the 90% interval of the ratio of their ranking criterion; 1 contains
    the best. None: rows that are not ranked by a prediction.
    """
    parallel: ServingConfig
    set: ChosenValues = field(default_factory=dict)
    """Query values that the ranking chose besides `parallel`, by path: cluster.num_gpus, or the
    load of a row of the Pareto front.
    """
    estimate: InferenceEstimate
    measurement: Measurement | None = None
    """Measurement of one replica, if a search ran it."""
    calibrated_estimate: InferenceEstimate | None = None
    """Estimate corrected by measurements on this cluster; for a measured configuration, its own
    latencies.
    """

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
    """A pool of equal replicas."""

    gpu: str
    tensor_parallel_size: int
    expert_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    redundant_experts: int = 0
    replicas: int
    """Number of replicas, each with tensor x attention data parallel devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEstimate:
    """A prediction for a pair of pools under one load. Figures are means over requests."""

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    ttft_s: float
    """Seconds of waiting for prefill, prefill, and the transfer of keys and values."""
    tpot_s: float
    request_latency_s: float
    transfer_s: float
    """Seconds to transfer one prompt's keys and values; part of ttft_s."""
    request_rate_per_second: float
    concurrency: int | float
    """Requests in flight; with `users`, as in InferenceEstimate."""
    users: int
    output_tokens_per_second_per_gpu: float
    """Output tokens per second, divided by the devices of both pools."""
    num_gpus: int
    prefill_tokens_per_second_per_gpu: float
    """Prompt tokens per second, including cached ones, divided by the devices of the prefill
    pool.
    """
    decode_tokens_per_second_per_gpu: float
    """Output tokens per second, divided by the devices of the decoding pool."""
    prefill_busy: float
    """Fraction of time for which a prefill replica is busy; near 1, prefill limits the rate."""
    decode_batch: float
    """Requests that a decoding replica serves at once."""
    max_decode_batch: float
    """Maximum number of requests that fit on a decoding replica."""
    intervals: ServingIntervals
    familiarity: Familiarity | None = None
    """How similar the nearest measured runs are, as in InferenceEstimate."""
    tails: Tails | None = None
    """Quantiles over single requests, from their wait for prefill and, at a rate, from the load of
    decoding.
    """
    cost_per_million_output_tokens: float | None = None
    """US dollars."""
    provenance: dict[str, object] = field(default_factory=dict)
    """The release whose constants were used, and the precision of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecommendation:
    """One pair of pools in a ranking, best first."""

    rank: int
    prefill: PoolConfig
    decode: PoolConfig
    estimate: PoolEstimate
