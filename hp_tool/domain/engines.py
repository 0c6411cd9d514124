"""Constants of serving engines: overheads over isolated kernels, and prediction errors."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from hp_tool.domain.fields import Strict
from hp_tool.domain.releases import release_numbers

Schedule = Literal["mixed", "prefill_first"]
CacheLayout = Literal["groups", "whole", "pools", "exact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about a serving engine. They apply to all its releases and are not fitted."""

    memory_fraction_of: Literal["device", "free"] = "device"
    """What `inference.memory_fraction` is a fraction of: the device's memory, or the memory that
    the weights leave free (TensorRT-LLM's KvCacheConfig.free_gpu_memory_fraction).
    """
    needs_room_for_longest: bool = False
    """Whether the engine starts only if its cache has room for the longest request
    (`vllm/v1/core/kv_cache_utils.py`, check_enough_kv_cache_memory).
    """
    splits_experts_over_stage: bool = False
    """Whether experts are sharded over either all ranks of a pipeline stage or none (vLLM's
    `--enable-expert-parallel`).
    """
    stores_recurrent_states: Literal["blocks", "requests", "snapshots"] = "blocks"
    """Where recurrent states of cached prompts are stored: at the ends of cache blocks, at the ends
    of requests and of their chunks (SGLang's default, `--mamba-scheduler-strategy no_buffer`), or
    in snapshots (TensorRT-LLM's mamba_state_cache_interval).
    """


_FACTS = {
    "vllm": EngineFacts(needs_room_for_longest=True, splits_experts_over_stage=True),
    "sglang": EngineFacts(stores_recurrent_states="requests"),
    "trtllm": EngineFacts(memory_fraction_of="free", stores_recurrent_states="snapshots"),
}


def engine_facts(engine: str) -> EngineFacts:
    """Return the facts about an engine, or the defaults for an unlisted engine."""
    return _FACTS.get(engine, EngineFacts())


ROCM_SILICON = ("mi300x", "mi355x")
"""Dies on which engines run ROCm builds, which have other kernels."""

GIB, MIB = 1 << 30, 1 << 20
VLLM_SMALL_BYTES = 70 * GIB
"""Device memory below which vLLM uses its smaller default limits
(`EngineArgs.get_batch_defaults`).
"""
SGLANG_DEVICES = (
    (20, 2048, 8),
    (35, 2048, 24),
    (60, 4096, 32),
    (90, 8192, 256),
    (160, 8192, 256),
    (math.inf, 16384, 512),
)
"""SGLang's defaults by device memory: (upper limit of the memory in GiB, tokens per prefill chunk,
batch size of the largest CUDA graph). Source: `ServerArgs._handle_gpu_memory_settings`.
"""
SGLANG_RESERVED_BYTES = 512 * MIB, 1.5 * MIB, 2.0 * MIB, 128 * MIB
"""Bytes that SGLang's default memory fraction leaves free: a fixed amount, per token of a chunk,
per sequence of a CUDA graph, and per device of a replica (assumed to have one device).
"""
SGLANG_DRAFTING_REQUESTS = 48
"""Default limit on running requests of an SGLang replica with speculative decoding
(`ServerArgs._handle_speculative_decoding`). Data-parallel attention groups divide it.
"""
SGLANG_DRAFTING_SINCE = (0, 4, 4)
"""First SGLang release with this default (sgl-project/sglang#3986)."""
VLLM_SMALL_SILICON = ("a100",)
"""Dies on which vLLM uses its smaller default limits whatever their memory size."""
CHUNKS_SINCE = (0, 8)
"""First vLLM release with the current default limits on large devices. Earlier releases ran up to
256 sequences, and prefilled prompts in one pass for models with at most WHOLE_PROMPTS positions.
"""
WHOLE_PROMPTS = 32_768
LONG_CHUNKED_SINCE = (0, 5, 4)
"""First vLLM release with chunked prefill by default for models with more than WHOLE_PROMPTS
positions. Earlier releases ran their longest request in one pass (vllm-project/vllm#6666).
"""
GROUPS_SINCE = (0, 9, 1)
"""First vLLM release in which sliding-window layers free blocks outside the window (the hybrid KV
cache manager, vllm-project/vllm#17996).
"""
AHEAD_SINCE = (0, 14)
"""First vLLM release that schedules the next pass during the current one
(vllm-project/vllm#27614).
"""
GRAPHS_SINCE = (0, 21)
"""First vLLM release that estimates the memory of CUDA graphs before it sizes the cache (shown by
its log) and that uses 0.92 of the device by default.
"""
GRAPHS_RESERVE_BYTES = 0.93 * GIB
"""Bytes that releases from GRAPHS_SINCE on reserve: 0.13 GiB, plus CUDA graphs, which took 0.3 to
1.6 GiB in the logs of six models.
"""

CONTEXT_COUNTED = (0, 7), (0, 9, 2)
"""vLLM releases [first, end) whose V1 engine subtracts all device memory outside PyTorch, including
the CUDA context, before it sizes the cache. Later releases subtract only what their profile run
adds (vllm-project/vllm#19312).
"""
CONTEXT_RESERVE_BYTES = 1.79 * GIB
"""Device memory outside PyTorch, as logged on one H100 (vllm-project/vllm#10511)."""

BY_RELEASE = ("cache_layout", "schedules_ahead", "replica_max_num_seqs")
"""Fields set by `device_defaults` and therefore omitted in files of constants."""


def device_defaults(
    engine: str,
    *,
    memory_bytes: float,
    silicon: str | None,
    version: str,
    release: str | None = None,
    positions: int | None = None,
    item_tokens: int = 0,
    speculative: bool = False,
) -> dict[str, Any]:
    """Return the engine's defaults on a device that differ from its profile. The profile describes
    devices of 80 GB.

    Args:
        engine: Name of the engine.
        memory_bytes: Memory of the device in bytes.
        silicon: Die of the device.
        version: Release of the profile.
        release: Release that runs; None: that of the profile.
        positions: Maximum number of positions of the model.
        item_tokens: Tokens of the largest image or video, if one pass must contain it.
        speculative: Whether the engine uses speculative decoding.
    """
    since = release_numbers(release or version)
    if engine == "sglang":
        chunk, graph = next(limits for gib, *limits in SGLANG_DEVICES if memory_bytes < gib * GIB)
        always, by_token, by_sequence, by_device = SGLANG_RESERVED_BYTES
        kept = always + by_token * chunk + by_sequence * graph + by_device
        share = round(max(memory_bytes - kept, 0.0) / memory_bytes, 3)
        limited = speculative and since >= SGLANG_DRAFTING_SINCE
        return {
            "max_num_batched_tokens": chunk,
            "memory_fraction": share,
            "cache_layout": "pools",
            "replica_max_num_seqs": SGLANG_DRAFTING_REQUESTS if limited else None,
        }
    if engine != "vllm":
        return {}
    settings: dict[str, Any] = {"cache_layout": "groups" if since >= GROUPS_SINCE else "whole"}
    if since >= AHEAD_SINCE:
        settings["schedules_ahead"] = True
    if since >= GRAPHS_SINCE:
        settings |= {"memory_fraction": 0.92, "reserve_bytes": GRAPHS_RESERVE_BYTES}
    if CONTEXT_COUNTED[0] <= since < CONTEXT_COUNTED[1]:
        settings["reserve_bytes"] = CONTEXT_RESERVE_BYTES
    if since < CHUNKS_SINCE:
        longest = positions or 0
        whole = longest if longest <= WHOLE_PROMPTS or since < LONG_CHUNKED_SINCE else 0
        return settings | {"max_num_seqs": 256, "max_num_batched_tokens": max(whole, 2048)}
    if silicon in VLLM_SMALL_SILICON or memory_bytes < VLLM_SMALL_BYTES:
        tokens = max(2048, item_tokens)
        return settings | {"max_num_seqs": 256, "max_num_batched_tokens": tokens}
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEfficiency(Strict):
    """Constants of one engine release: overheads relative to isolated kernels, scheduling, and
    memory.
    """

    engine: str
    version: str
    schedule: Schedule
    """mixed: prefill chunks run in the same pass as decoding; prefill_first: decoding pauses while
    prompts are waiting.
    """
    matmul_slowdown: float
    """Time of a matmul in the engine relative to the same matmul timed in isolation."""
    attention_slowdown: float
    """Time of attention over the paged KV cache relative to the same kernel timed in isolation."""
    narrow_cache_slowdown: float = 1.0
    """Time per byte of decoding attention if keys and values are cached below 16 bits, relative to
    16 bits. The kernel converts them to a wider format.
    """
    communication_slowdown: float
    """Time of a collective in the engine relative to the same collective timed in isolation,
    including the time that ranks wait for each other.
    """
    cast_share: float
    """Time of casts to precisions below 16 bits in the engine, relative to the same casts timed in
    isolation. It is below 1 if casts are fused into the preceding norm or activation, and above 1
    if scales need a separate pass.
    """
    layer_overhead_s: float
    """Fixed seconds per layer and forward pass: norms, rotary embedding, cache writes,
    quantisation.
    """
    iteration_overhead_s: float
    """Seconds between two forward passes for scheduling, sampling and launch."""
    sequence_overhead_s: float
    """Host seconds per running sequence and iteration: sampling parameters, detokenization,
    streaming.
    """
    schedules_ahead: bool = False
    """Whether the host schedules the next pass during the current one (asynchronous scheduling)."""
    eager_layer_s: float
    """Host seconds to launch the kernels of one layer without CUDA graphs. Because graphs cover
    only decoding passes, a pass with prompts takes at least as long as its launches.
    """
    prompt_layer_overhead_s: float
    """Seconds per prompt and layer of engine work during which decoding waits, such as writing the
    layer's cache blocks.
    """
    request_overhead_s: float
    """Seconds of serial front-end work per request: HTTP, tokenization, admission. They limit the
    request rate of a replica.
    """
    stream_overhead_s: float
    """Seconds per streamed token for detokenization and for sending one event to the client."""
    first_token_s: float = 0.0
    """Seconds before the first token in which neither the device nor the front end works on the
    request: hops between processes, and waiting for the next scheduler iteration.
    """
    backlog_share: float = 0.0
    """Fraction of a request's waiting time at the front end that precedes its first token, in
    addition to the front end's work on that token. Tokens and new requests queue in order of
    arrival.
    """
    prefill_group: float
    """Number of requests, including the request itself, whose prompts are prefilled before its
    first token, in a closed load of equal lengths where requests arrive together.
    """
    wave_share: float
    """Fraction of the running requests that start together in the measured runs of equal lengths.
    """
    batch_wait_iterations: float = 0.0
    """Number of passes for which a prompt waits for further prompts before prefill
    (batch_wait_timeout_iters).
    """
    max_num_seqs: int
    """Default maximum number of running requests per scheduler."""
    replica_max_num_seqs: int | None = None
    """Default maximum number of running requests per replica, split across its attention groups; it
    replaces `max_num_seqs`. None: no such limit.
    """
    max_num_batched_tokens: int
    """Default maximum number of tokens per pass."""
    memory_fraction: float
    """Fraction of the device's memory that the engine uses, or of the free memory that the cache
    uses (`memory_fraction_of`).
    """
    memory_fraction_of: Literal["device", "free"] = "device"
    reserve_bytes: float
    """Bytes of libraries, workspaces and CUDA graphs inside the memory fraction, for a replica of
    one device.
    """
    communicator_bytes: float = 0.0
    """Additional bytes of communication buffers on each device of a larger replica."""
    multicast_bytes: float = 0.0
    """Additional bytes of NCCL buffers in groups of more than two devices whose switches support
    multicast (NVLS).
    """
    sampler_bytes_per_logit: float = 4.0
    """Bytes that the sampler needs per logit, at the maximum number of running sequences."""
    working_set: Literal["summed", "profiled", "outside"] = "summed"
    """summed: the memory fraction includes the activations and the sampler's memory; profiled: it
    includes the larger of the two; outside: it includes only weights and cache.
    """
    cache_layout: CacheLayout = "exact"
    """How layers with different cache sizes share the cache. groups: vLLM's groups of layers with
    blocks of equal size; whole: sliding-window layers cache all tokens; pools: SGLang's pools, one
    fraction per kind of layer; exact: each layer uses only what it caches.
    """
    reserve_doubt_bytes: float = 2e9
    """Half-width of the 90% interval of the memory inside the memory fraction other than the cache,
    in bytes.
    """
    kv_reserved_output_fraction: float
    """Fraction of the output length that a running request reserves in a full cache, on average:
    0.5 if blocks are allocated as tokens are generated, 1 if they are reserved at admission.
    """
    fp8_cache_with: tuple[str, ...]
    """Weight precisions for which keys and values are cached in fp8 by default. TensorRT-LLM
    follows the checkpoint (KvCacheConfig.dtype auto), and ModelOpt's fp8 and nvfp4 checkpoints
    specify fp8 (kv_cache_quant_algo).
    """
    fp8_scales: Literal["block", "tensor"] = "block"
    """Scales of 8-bit experts: one per block of weights, as published, or one per matrix in
    releases without kernels for block scales.
    """
    ttft_log_sd: float
    """Standard deviation of log(measured / predicted) on held-out groups, scaled so that 90% of the
    groups lie within the 90% interval of a normal distribution.
    """
    tpot_log_sd: float
    throughput_log_sd: float
    pair_log_sd: float | None = None
    """The same for the throughput ratio of two layouts under one load; None: their errors are
    assumed to be independent.
    """
    fitted_silicon: tuple[str, ...] = ()
    """Dies of the runs to which the constants were fitted."""
    assumed: tuple[str, ...] = ()
    """Constants that the fitted runs hardly determine: the fit reduced their prior uncertainty by
    less than half.
    """
    fitted_on: str
    """Rows and command that produced the fitted constants."""
    kernels_alone: bool = False
    """Whether the constants come from timed kernels and the mean overheads of other engines,
    without any serving run. The deviations are those that such constants had on a release with
    runs. They apply only to queries that name this release or a later one.
    """
    measured: bool = True
    """Whether this release was measured. False: the constants come from another release or engine,
    and intervals are wider.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertEfficiency(Strict):
    """Overheads of MoE layers relative to isolated kernels; by default only launches."""

    grouped_slowdown: float = 1.0
    """Time of routed experts in the engine relative to the same kernels timed in isolation."""
    layer_overhead_s: float = 0.0
    """Fixed seconds per MoE layer and forward pass, in addition to the timed experts, for the
    kernels launched around them.
    """
    prompt_layer_overhead_s: float = 0.0
    """Seconds per prompt and MoE layer of engine work during which decoding waits."""
    eager_layer_s: float = 0.0
    """Host seconds to launch the kernels of one MoE layer without CUDA graphs, in addition to those
    of a dense layer. They raise the minimum time of a pass with prompts
    (`EngineEfficiency.eager_layer_s`).
    """
    first_token_s: float = 0.0
    """Seconds added to the engine's `first_token_s`."""
    popularity_variance: float = 0.0
    """Variance of the experts' popularity among the tokens of one pass, around a mean of 1. It
    determines how many experts a batch activates.
    """
    load_variance: float = 0.0
    """Variance of the experts' popularity over many passes. It determines how unevenly the ranks
    are loaded.
    """
    ttft_log_sd: float = 0.0
    """Standard deviations of log(measured / predicted) on held-out groups, as in
    EngineEfficiency.
    """
    tpot_log_sd: float = 0.0
    throughput_log_sd: float = 0.0
    fitted_on: str = ""


ISOLATED_EXPERTS = ExpertEfficiency()


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsEfficiency(Strict):
    """Overheads of an engine with default settings relative to one with tuned settings."""

    slowdown: float
    """Time of a pass relative to one with tuned settings, which select faster kernels and
    fusions.
    """
    ttft_log_sd: float
    """Standard deviations of log(measured / predicted) on held-out models."""
    tpot_log_sd: float
    throughput_log_sd: float
    fitted_on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEfficiency(Strict):
    """Overheads of separate prefill and decoding pools, for any engine."""

    handover_s: float
    """Seconds per request between the pools for routing, connections and scheduling, in addition to
    the data transfer.
    """
    ttft_log_sd: float
    """Standard deviations of log(measured / predicted) on held-out pools, as in
    EngineEfficiency.
    """
    tpot_log_sd: float
    throughput_log_sd: float
    fitted_on: str
