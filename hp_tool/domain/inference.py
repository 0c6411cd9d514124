"""Inference section of a query: token lengths, arrivals, engine and features of a serving load. It
is independent of the parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval, MaxLen

from hp_tool.domain.fields import (
    Amount,
    Count,
    Devices,
    Fraction,
    OneOrMany,
    Release,
    Shown,
    Strict,
)
from hp_tool.domain.hardware import Precision

RATE_PATH = "inference.request_rate_per_second"
"""Path of the request rate in `set` if a ranking chose the rate."""
MAX_TRACE_REQUESTS = 10_000
"""Maximum number of requests of a trace inside a query; files may have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec(Strict):
    """How requests arrive."""

    arrival: Annotated[
        Literal["closed", "burst", "poisson", "offline"], Shown("Load", "Serving", unset="closed")
    ] = "closed"
    """closed (with concurrency): a new request follows each finished one. poisson: with
    request_rate_per_second. offline (with neither): all requests are queued at once, without an
    HTTP front end. burst (with neither): num_prompts requests arrive at once (`--request-rate
    inf`). closed and poisson with neither: find the highest load.
    """
    num_prompts: Count | None = None
    """burst and offline: total number of requests (None for offline: more than run at once). Omit
    it for other loads, which are modelled in steady state.
    """
    client: Annotated[
        Literal["aiperf", "genai-bench", "vllm-bench", "trtllm-bench", "inferencemax"] | None,
        Shown("Client", "Serving", unset="lengths differ"),
    ] = None
    """Client that sends a closed load, with its defaults: whether lengths are equal, so that
    prompts keep arriving together, and how many requests it sends. None: varying lengths, ten
    requests per request in flight.
    """
    warmup: Annotated[int, Interval(ge=0, le=1 << 31)] | None = None
    """Number of requests before the measured ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSpec(Strict):
    """Speculative decoding: drafted tokens are verified together in one pass of the model (arXiv
    2211.17192).
    """

    num_speculative_tokens: Annotated[int, Interval(ge=1, le=64)]
    """Tokens drafted per pass (k)."""
    acceptance_rate: Annotated[float, Interval(ge=0.0, le=1.0)]
    """Probability that a drafted token is accepted, given that those before it were (a)."""
    draft_cost_fraction: Annotated[float, Interval(ge=0.0, le=10.0)] = 0.0
    """Time of one draft token divided by that of a decoding pass of the model (c): 0 for n-grams;
    for a draft model or multi-token prediction about the ratio of the weights read.
    """
    draft_model: str | None = None
    """Checkpoint that drafts: an EAGLE head, or a smaller model. Its weights and cache take memory
    if the catalogue has it or its name contains EAGLE. None: n-grams if drafts cost nothing, else
    the model's own layers for it (MTP).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationSpec(Strict):
    """Separate pools of replicas for prefill and decoding; omitted sizes are chosen. With two kinds
    of GPU (cluster.stages), the first kind runs prefill.
    """

    prefill_tensor_parallel_size: Annotated[
        OneOrMany[Devices],
        Shown("Prefill: tensor parallel", "Pools for prefill and decoding", unset="any"),
    ] = None
    """Devices that split a prefill replica's attention; a value or a list."""
    decode_tensor_parallel_size: Annotated[
        OneOrMany[Devices],
        Shown("Decoding: tensor parallel", "Pools for prefill and decoding", unset="any"),
    ] = None
    """Devices that split a decoding replica's attention; a value or a list."""
    prefill_expert_parallel_size: Annotated[
        OneOrMany[Devices],
        Shown("Prefill: expert parallel", "Pools for prefill and decoding", unset="one or all"),
    ] = None
    """Devices of a prefill replica that divide the experts; None: one, or all of the replica."""
    decode_expert_parallel_size: Annotated[
        OneOrMany[Devices],
        Shown("Decoding: expert parallel", "Pools for prefill and decoding", unset="one or all"),
    ] = None
    """Devices of a decoding replica that divide the experts; None: one, or all of the replica."""
    prefill_attention_data_parallel_size: Annotated[
        OneOrMany[Devices],
        Shown("Prefill: attention data parallel", "Pools for prefill and decoding", unset="any"),
    ] = None
    """Groups of a prefill replica that attend to different requests; None: powers of two for a
    model with experts.
    """
    decode_attention_data_parallel_size: Annotated[
        OneOrMany[Devices],
        Shown("Decoding: attention data parallel", "Pools for prefill and decoding", unset="any"),
    ] = None
    """Groups of a decoding replica that attend to different requests; None: powers of two for a
    model with experts.
    """
    prefill_replicas: Count | None = None
    """Number of prefill replicas."""
    decode_replicas: Count | None = None
    """Number of decoding replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyRange(Strict):
    """Range of concurrencies, both ends included; the answer is the highest within the targets."""

    min: Count = 1
    max: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRange(Strict):
    """Range of request rates per second, both ends included; the answer is the highest within the
    targets.
    """

    min: Amount
    max: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalTokens(Strict):
    """A log-normal distribution of lengths."""

    median: Annotated[float, Interval(ge=1.0, le=float(1 << 24))]
    """Median length in tokens."""
    sigma: Annotated[float, Interval(ge=0.0, le=10.0)]
    """Standard deviation of the logarithm."""
    longest: Annotated[int, Interval(ge=1, le=1 << 24)] = 1 << 17
    """Maximum length; longer ones are truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec(Strict):
    """A trace of requests as columns of equal length; a distribution may replace a column of
    lengths.
    """

    arrival_s: (
        Annotated[
            tuple[Annotated[float, Interval(ge=0.0, le=1e12)], ...], MaxLen(MAX_TRACE_REQUESTS)
        ]
        | None
    ) = None
    """Arrival time of each request in seconds; None: only lengths are given, for a concurrency or
    for independent arrivals at a rate.
    """
    input_tokens: (
        Annotated[
            tuple[Annotated[int, Interval(ge=1, le=1 << 24)], ...], MaxLen(MAX_TRACE_REQUESTS)
        ]
        | LogNormalTokens
    )
    output_tokens: (
        Annotated[
            tuple[Annotated[int, Interval(ge=1, le=1 << 24)], ...], MaxLen(MAX_TRACE_REQUESTS)
        ]
        | LogNormalTokens
    )
    prefix_tokens: (
        Annotated[
            tuple[Annotated[int, Interval(ge=0, le=1 << 24)], ...], MaxLen(MAX_TRACE_REQUESTS)
        ]
        | None
    ) = None
    """Input tokens of each request that are found in the engine's prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceWorkload(Strict):
    """A serving load. Without concurrency and request rate, the answer is the highest load within
    the targets; a list or range of either restricts the search.
    """

    input_length: Annotated[
        Annotated[int, Interval(ge=0, le=1 << 31)], Shown("Input tokens", "Serving", example="4000")
    ] = 0
    """Prompt tokens; 0 or omitted: those of the trace."""
    output_length: Annotated[
        Annotated[int, Interval(ge=0, le=1 << 31)],
        Shown("Output tokens", "Serving", example="1000"),
    ] = 0
    """Output tokens; 0 or omitted: those of the trace."""
    trace: str | TraceSpec | None = None
    """Requests to simulate one by one: columns, a registered name, or (command line and Python) a
    file: CSV, Mooncake's JSON lines or Azure's CSV. They arrive at their recorded times, or
    according to `concurrency` or `request_rate_per_second` if set.
    """
    concurrency: Annotated[
        OneOrMany[Count] | ConcurrencyRange,
        Shown("Requests in flight", "Serving", unset="most within targets"),
    ] = None
    """Requests in flight over all GPUs; a list or {min, max}: find the highest within the targets.
    """
    request_rate_per_second: Annotated[
        OneOrMany[Amount] | RateRange, Shown("Requests per second", "Serving", unset="instead")
    ] = None
    """Requests per second over all GPUs, instead of concurrency; a list or {min, max}: find the
    highest within the targets. With objective min_gpus, a list finds the fewest devices for each
    rate.
    """
    think_time_s: Annotated[
        Annotated[float, Interval(ge=0.0, le=1e9)], Shown("Think time (s)", "Serving")
    ] = 0.0
    """Seconds between an answer and the same user's next request; `users` then counts independent
    users.
    """
    precision: Annotated[
        Precision | Literal["int8", "int4", "mxfp4"] | None,
        Shown("Precision", "Serving", unset="as published"),
    ] = None
    """Precision of the weights; mxfp4 and nvfp4 apply to the experts of a mixture only. None: that
    of the published checkpoint.
    """
    kv_cache_precision: Precision | None = None
    """Precision of cached keys and values; None: the engine's choice for this precision."""
    prefix_cache_hit_rate: Fraction = 0.0
    """Fraction of prompt tokens found in the engine's prefix cache and not recomputed; for a trace,
    replaces its prefix_tokens.
    """
    prefix_groups: Count | None = None
    """Number of different prefixes shared by the requests of a `prefix_cache_hit_rate`; each is
    cached once. None: one, such as a system prompt. If it equals the number of running requests,
    each request has its own prefix, as in conversations.
    """
    speculative: SpeculativeSpec | None = None
    expert_imbalance: Annotated[
        Annotated[float, Interval(ge=1.0, le=1e6)] | None,
        Shown("Expert imbalance", "Experts", unset="expected"),
    ] = None
    """Tokens of the busiest expert rank divided by the mean; None: as expected from the router's
    choices and the replication of experts; 1: balanced.
    """
    two_batch_overlap: Annotated[
        bool | None, Shown("Two-batch overlap", "Experts", unset="where it is faster")
    ] = None
    """Whether one half of a batch computes while the other half's tokens are exchanged with the
    experts; None: if experts span NVLink domains and it is faster.
    """
    disaggregated: DisaggregationSpec | None = None
    """recommend only: set to {} to also rank separate pools for prefill and decoding."""
    engine: Annotated[str, Shown("Engine", "Serving", unset="vllm")] = "vllm"
    """Inference engine: vllm, sglang, trtllm or megatron-core."""
    engine_version: Release | None = None
    """Release of the engine; None: the newest measured."""
    engine_settings: Annotated[
        Literal["tuned", "defaults"], Shown("Engine settings", "Serving", unset="tuned")
    ] = "tuned"
    """How the engine was started: tuned (as in benchmarks, with the fastest kernels for the model)
    or defaults (only model and sizes are set).
    """
    memory_fraction: Annotated[
        Annotated[float, Interval(ge=0.01, le=1.0)] | None,
        Shown("Engine memory fraction", "Serving", unset="engine default"),
    ] = None
    """Memory fraction of the engine: vLLM's gpu_memory_utilization, SGLang's mem_fraction_static,
    TensorRT-LLM's free_gpu_memory_fraction. It replaces constraints.memory_headroom_fraction. None:
    the engine's default, within that headroom.
    """
    max_model_len: Annotated[
        Count | None, Shown("Longest request (tokens)", "Serving", unset="model's positions")
    ] = None
    """Tokens of the longest request, prompt and answer, that the engine is started for: vLLM's
    max_model_len, SGLang's context_length, TensorRT-LLM's max_seq_len. vLLM does not start unless
    its cache has room for one. None: the positions of the model; no room is required.
    """
    load: LoadSpec | None = None
    """How requests arrive; it determines the TTFT."""
