"""A configuration of an inference engine, and its estimate."""

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
"""Configuration of a search's run, for training or serving."""
RUN_CONFIGS: dict[str, type[ParallelConfig | ServingConfig]] = {
    "training": ParallelConfig,
    "inference": ServingConfig,
}
"""Type of configuration by kind of query."""


def config_query(config: RunConfig) -> ParallelQuery:
    """Return the `parallel` section of a query that describes exactly this configuration."""
    return ParallelQuery(**{name: getattr(config, name) for name in type(config).__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Bytes on one device of the fullest stage; the parts sum to total_bytes."""

    total_bytes: float
    """Total bytes, including the KV cache that the load requires but at most the available
    cache.
    """
    capacity_bytes: float
    """Device memory that the engine may use, in bytes."""
    worst_stage: int = 0
    """Index of the stage, 0-based. It is always the first stage: no other stage has more layers,
    and the first also has the embedding.
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
    """Number of tokens with its 90% interval."""

    low: int
    expected: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Capacity of one replica's KV cache."""

    tokens: CacheTokens
    """Capacity in tokens, for requests with max_context tokens. Windows and recurrent states take
    as much memory for short requests, so fewer tokens fit if requests are short.
    """
    bytes_per_device: float
    max_context: int
    """Maximum tokens per request, prompt and answer: the model's positions, or fewer if memory
    limits them.
    """
    requests: int
    """Number of the load's requests that fit in the cache at full length."""
    alike: bool = True
    """Whether all layers cache every token. If not, fewer tokens of shorter requests fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGoodput:
    """Rate of requests that meet the limits of all targets on single requests.

    The limit of a latency is its tightest quantile target or, without any, its target on the mean.
    """

    fraction: float
    """Fraction of all requests."""
    requests_per_second_per_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingIntervals:
    """Ranges that contain the measured mean with the given confidence."""

    confidence: float
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    output_tokens_per_second_per_gpu: tuple[float, float]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFix:
    """A small change that makes an infeasible serving configuration feasible, and its effect."""

    change: str
    """The change in words, with its consequences in parentheses, such as `TP 4 -> 8 (DP 2 ->
    1)`.
    """
    changed: tuple[str, ...]
    """Fields of `parallel` that differ from the requested configuration."""
    parallel: ServingConfig
    """The complete fixed configuration; valid input."""
    set: ChosenValues = field(default_factory=dict)
    """Query values other than `parallel` that the fix requires, by path: cluster.num_gpus."""
    num_gpus: int
    """Number of devices. It exceeds that of the query only if the change includes it."""
    memory_total_bytes: float
    ttft_s: float
    tpot_s: float
    request_latency_s: float
    output_tokens_per_second_per_gpu: float
    throughput_change_fraction: float | None = None
    """Relative change of tokens per second per GPU, such as 0.03 for 3% more; None if the requested
    configuration has no throughput.
    """
    remaining: tuple[Reason, ...] = ()
    """Targets that the fix still misses, if no change meets them and this one comes nearest."""
    fit: ClassVar[None] = None
    """Set only for training, like the next field."""
    out_of_memory_probability: ClassVar[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Prices in US dollars per million tokens. The device time of a request is divided between its
    prompt and its answer.
    """

    input: float
    """Price of prompt tokens, including cached ones, from the time of prefill."""
    output: float
    """Price of output tokens, from the time of decoding."""


ALL_RUN_FRACTION = 0.99
"""Minimum fraction of the requests in flight that must be running for no request to count as
waiting.
"""


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
    """Requests in flight over all GPUs: those of the load, the highest number within the targets if
    the load is open, or the mean at a given rate (Little's law).
    """
    users: int | None = None
    """Number of users that generate the load: concurrency + rate x inference.think_time_s. Each has
    one request at a time and waits this long before the next.
    """
    max_concurrency: int | None = None
    """Maximum number of running requests over all GPUs, limited by memory or max_num_seqs."""
    max_concurrency_without_preemption: int | None = None
    """Number of running requests that fit even if all of them generate their last token. Between
    this number and max_concurrency, requests of mixed ages fit. If their ages coincide, the engine
    preempts some and recomputes them.
    """
    running_requests: float | None = None
    """Mean number of running requests. The other requests in flight are waiting."""
    expert_imbalance: float | None = None
    """Expected load of the busiest expert-parallel rank divided by the mean load, during
    decoding.
    """
    preemptions_per_request: float | None = None
    """Mean number of preemptions per request because the cache is full; a preempted request is
    recomputed. Only for traces, which are simulated event by event.
    """
    kv_cache_limited: bool | None = None
    """Whether running_requests is limited by KV cache memory, not by the load."""
    cost_per_million_output_tokens: float | None = None
    """US dollars per million output tokens, with all device time charged to the output."""
    cost_per_million_tokens: TokenPrices | None = None
    """US dollars per million input tokens and per million output tokens."""
    tails: Tails | None = None
    goodput: ServingGoodput | None = None
    """Rate of requests within their targets; None without targets."""
    highest_load: float | None = None
    """If the query's load is too high: the highest load that is possible, in requests in flight or
    per second as in the query. None in batches, and if no load is possible.
    """
    fixes: tuple[ServingFix, ...] = ()
    """Changes that make an infeasible configuration feasible; empty in batches and
    recommendations.
    """
    intervals: ServingIntervals | None = None
    familiarity: Familiarity | None = None
    """How similar the nearest measured runs are, which determines the interval widths."""
    provenance: dict[str, object] = field(default_factory=dict)
    fit: ClassVar[None] = None
    """Set only for training, like the next field."""
    out_of_memory_probability: ClassVar[None] = None

    @property
    def some_wait(self) -> bool:
        """Whether fewer than ALL_RUN_FRACTION of the requests in flight are running."""
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
    """Group of tied rows, by the 90% interval of the ratio of their ranking criterion to the best
    one; 1 contains the best row. None for rows that are not ranked by a prediction.
    """
    parallel: ServingConfig
    set: ChosenValues = field(default_factory=dict)
    """Query values other than `parallel` that the ranking chose, by path: cluster.num_gpus, or the
    load of a row of the Pareto front.
    """
    estimate: InferenceEstimate
    measurement: Measurement | None = None
    """Measurement of one replica, if a search ran it."""
    calibrated_estimate: InferenceEstimate | None = None
    """Estimate corrected by measurements on this cluster. For a measured configuration, it has the
    measured latencies.
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
    """A pool of identical replicas."""

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
    """Seconds until the first token: queueing for prefill, prefill, and the transfer of keys and
    values.
    """
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
    """Fraction of time for which a prefill replica is busy. Near 1, prefill limits the request
    rate.
    """
    decode_batch: float
    """Mean number of requests that a decoding replica serves at once."""
    max_decode_batch: float
    """Maximum number of requests that fit on a decoding replica."""
    intervals: ServingIntervals
    familiarity: Familiarity | None = None
    """How similar the nearest measured runs are, as in InferenceEstimate."""
    tails: Tails | None = None
    """Quantiles over single requests. They account for the wait for prefill and, at a given rate,
    for the load of decoding.
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
