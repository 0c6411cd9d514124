"""Constants of serving engines: what they add to isolated kernels, and how far their predictions
scatter.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from hp_tool.domain.fields import Strict
from hp_tool.domain.releases import release_numbers

Schedule = Literal["mixed", "prefill_first"]
CacheLayout = Literal["groups", "whole", "pools", "exact"]

FRACTION_OF_FREE_MEMORY = ("trtllm",)
"""Engines whose own memory setting is the cache's share of what weights leave free
(KvCacheConfig.free_gpu_memory_fraction), not a share of the device.
"""


GIB, MIB = 1 << 30, 1 << 20
VLLM_SMALL_BYTES = 70 * GIB
"""Devices of less memory get vLLM's lower limits (`EngineArgs.get_batch_defaults`)."""
SGLANG_DEVICES = (
    (20, 2048, 8),
    (35, 2048, 24),
    (60, 4096, 32),
    (90, 8192, 256),
    (160, 8192, 256),
    (math.inf, 16384, 512),
)
"""SGLang's (GiB of devices below which, tokens of a prefill chunk, sequences of the largest CUDA
graph), by `ServerArgs._handle_gpu_memory_settings`.
"""
SGLANG_RESERVED_BYTES = 512 * MIB, 1.5 * MIB, 2.0 * MIB, 128 * MIB
"""What SGLang's default share leaves: in all, for each token of a chunk, for each sequence of a
graph, for each device of a replica, which is taken as one.
"""
VLLM_SMALL_SILICON = ("a100",)
"""Dies with vLLM's defaults for small devices, independent of their memory."""
CHUNKS_SINCE = (0, 8)
"""vLLM's release from which passes have their present limits on large devices: before it they held
256 sequences, and a whole prompt where models know no more positions than WHOLE_PROMPTS.
"""
WHOLE_PROMPTS = 32_768
GROUPS_SINCE = (0, 9, 1)
"""vLLM's release from which windowed layers free the blocks that they no longer need (the hybrid KV
cache manager, vllm-project/vllm#17996).
"""
AHEAD_SINCE = (0, 14)
"""vLLM's release from which it schedules a pass during the one before
(vllm-project/vllm#27614).
"""
GRAPHS_SINCE = (0, 21)
"""vLLM's release from which it estimates CUDA graphs before it sizes the cache, as it prints, and
takes 0.92 of the device.
"""
GRAPHS_RESERVE_BYTES = 0.93 * GIB
"""Its reserve since: 0.13 GiB, and graphs of 0.3 to 1.6 GiB in the logs of six models."""

BY_RELEASE = ("cache_layout", "schedules_ahead")
"""Fields that `device_defaults` sets by engine and release; files of constants omit them."""


def device_defaults(
    engine: str,
    *,
    memory_bytes: float,
    silicon: str | None,
    version: str,
    release: str | None = None,
    positions: int | None = None,
) -> dict[str, Any]:
    """Return the engine's own settings on such a device, where they differ from its profile's,
    which are those of 80 GB devices.

    Args:
        engine: Name of the engine.
        memory_bytes: Memory of the device.
        silicon: Its die.
        version: Release of the profile.
        release: Release that runs; None: the profile's.
        positions: The most that the model knows.
    """
    if engine == "sglang":
        chunk, graph = next(limits for gib, *limits in SGLANG_DEVICES if memory_bytes < gib * GIB)
        always, by_token, by_sequence, by_device = SGLANG_RESERVED_BYTES
        kept = always + by_token * chunk + by_sequence * graph + by_device
        share = round(max(memory_bytes - kept, 0.0) / memory_bytes, 3)
        return {
            "max_num_batched_tokens": chunk,
            "memory_fraction": share,
            "cache_layout": "pools",
        }
    if engine != "vllm":
        return {}
    since = release_numbers(release or version)
    settings: dict[str, Any] = {"cache_layout": "groups" if since >= GROUPS_SINCE else "whole"}
    if since >= AHEAD_SINCE:
        settings["schedules_ahead"] = True
    if since >= GRAPHS_SINCE:
        settings |= {"memory_fraction": 0.92, "reserve_bytes": GRAPHS_RESERVE_BYTES}
    if since < CHUNKS_SINCE:
        whole = positions if positions is not None and positions <= WHOLE_PROMPTS else 0
        return settings | {"max_num_seqs": 256, "max_num_batched_tokens": max(whole, 2048)}
    if silicon in VLLM_SMALL_SILICON or memory_bytes < VLLM_SMALL_BYTES:
        return settings | {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEfficiency(Strict):
    """Constants of one engine version: overheads over isolated kernels, scheduling, and memory."""

    engine: str
    version: str
    schedule: Schedule
    """mixed: prefill chunks ride along with decoding; prefill_first: waiting prompts stop
    decoding.
    """
    matmul_slowdown: float
    """Time of matmuls in the engine relative to the same matmul timed alone."""
    attention_slowdown: float
    """Time of attention over the paged KV cache relative to the same kernel timed alone."""
    narrow_cache_slowdown: float = 1.0
    """Decoding attention over keys and values of fewer than 16 bits, by its bytes, against that
    over 16: it widens them.
    """
    communication_slowdown: float
    """Time of collectives in the engine relative to the same collective timed alone, including
    waits of ranks for each other.
    """
    cast_share: float
    """Casts to fewer than 16 bits in the engine against the same timed alone: below 1 where they
    are fused into the norm or the activation function before the matmul, above 1 where scales take
    a pass of their own.
    """
    layer_overhead_s: float
    """Norms, rotary embedding, cache writes, quantisation: fixed cost per layer and forward
    pass.
    """
    iteration_overhead_s: float
    """Scheduling, sampling and launch between two forward passes."""
    sequence_overhead_s: float
    """Host work per running sequence and iteration: sampling parameters, detokenization,
    streaming.
    """
    schedules_ahead: bool = False
    """Whether the host works on the next pass during one (asynchronous scheduling)."""
    eager_layer_s: float
    """Host time to launch the kernels of one layer one by one: CUDA graphs hold passes that only
    decode, and a pass with prompts takes at least as long as its launches.
    """
    prompt_layer_overhead_s: float
    """The engine's work per prompt and layer that decoding waits for: it writes each layer's cache
    blocks.
    """
    request_overhead_s: float
    """The front end's serial work per request: HTTP, tokenization, admission. It bounds the request
    rate of a replica.
    """
    stream_overhead_s: float
    """Seconds per streamed token: detokenization and one event to the client."""
    first_token_s: float = 0.0
    """Seconds before a first token in which device and front end are free for others: hops between
    processes, and waiting for the scheduler's next turn.
    """
    backlog_share: float = 0.0
    """Share of what the front end makes a request wait that falls before its first token, beyond
    the front end's own work on that: tokens and new requests queue up in order of arrival.
    """
    prefill_group: float
    """Requests whose prompts a request waits for in a closed load of equal lengths, its own
    included: they come together.
    """
    wave_share: float
    """Share of the running requests that start together, in the measured runs of equal lengths."""
    batch_wait_iterations: float = 0.0
    """Passes that a prompt waits for others to join it before any of them is computed
    (batch_wait_timeout_iters).
    """
    max_num_seqs: int
    """The engine's default."""
    max_num_batched_tokens: int
    """The engine's default."""
    memory_fraction: float
    """Fraction of device memory for the engine, or of the free memory for the cache."""
    memory_fraction_of: Literal["device", "free"] = "device"
    reserve_bytes: float
    """Libraries, workspaces and CUDA graphs within that share, on a replica of one device."""
    communicator_bytes: float = 0.0
    """Buffers of collectives within that share, on each device of a larger replica."""
    multicast_bytes: float = 0.0
    """What NCCL adds to them for groups of more than two where switches multicast (NVLS)."""
    sampler_bytes_per_logit: float = 4.0
    """Bytes of the sampler per logit of the maximum number of running sequences."""
    working_set: Literal["summed", "profiled", "outside"] = "summed"
    """summed: activations and the sampler's memory lie within the share side by side; profiled: the
    higher peak of the two; outside: the share is of weights and cache alone.
    """
    cache_layout: CacheLayout = "exact"
    """How layers that cache unlike amounts share the cache. groups: vLLM's blocks of one size for
    groups of layers; whole: windowed layers cache all tokens; pools: SGLang's shares for each kind
    of layer; exact: each layer takes what it caches.
    """
    reserve_doubt_bytes: float = 2e9
    """Half of the 90% interval of the memory that is not the cache's, within that share."""
    kv_reserved_output_fraction: float
    """Share of the output length that a running request's cache holds on average when the cache is
    full: 0.5 where blocks are handed out as tokens appear, 1 where they are promised at admission.
    """
    fp8_cache_with: tuple[str, ...]
    """Precisions of weights beside which keys and values are cached in fp8 unless a query says
    otherwise. TensorRT-LLM does as the checkpoint says (KvCacheConfig.dtype auto), and ModelOpt's
    fp8 and nvfp4 ones say fp8 (kv_cache_quant_algo).
    """
    fp8_scales: Literal["block", "tensor"] = "block"
    """Of experts in 8 bits: a scale for each block of weights, as their makers publish them, or, in
    releases before there were kernels for those, one for each matrix.
    """
    ttft_log_sd: float
    """Standard deviation of log(measured / predicted) on groups that were not fitted on, such that
    90% of them lie within a normal's 90%.
    """
    tpot_log_sd: float
    throughput_log_sd: float
    pair_log_sd: float | None = None
    """The same of the ratio of two layouts' throughputs under one load; None: as if they erred
    independently.
    """
    fitted_silicon: tuple[str, ...] = ()
    """Dies of the runs behind the constants."""
    assumed: tuple[str, ...] = ()
    """Constants that these runs hardly tell: less than half of what was unsure before them is known
    after.
    """
    fitted_on: str
    """Rows and command that gave the fitted constants."""
    kernels_alone: bool = False
    """Whether no served run is behind this: timed kernels, and means of what other engines add. Its
    deviations are those that a measured release showed such constants to have; a query gets it
    where it names this release or a later one.
    """
    measured: bool = True
    """False: constants of another version or engine; results carry wider intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertEfficiency(Strict):
    """Overheads of layers with experts over isolated kernels; by default only their launches."""

    grouped_slowdown: float = 1.0
    """Time of routed experts in the engine relative to the same kernels timed alone."""
    layer_overhead_s: float = 0.0
    """Fixed cost per layer with experts and forward pass beside timed experts: what the engine
    launches around them.
    """
    prompt_layer_overhead_s: float = 0.0
    """The engine's work per prompt and layer with experts that decoding waits for."""
    eager_layer_s: float = 0.0
    """Host time to launch the kernels of one layer with experts one by one, beyond a dense one's:
    EngineEfficiency's floor of a pass with prompts is higher by it.
    """
    first_token_s: float = 0.0
    """Seconds before a first token in which device and front end are free, beyond the engine's."""
    popularity_variance: float = 0.0
    """Variance of the experts' popularity among the tokens of one pass, around a mean of 1: how few
    experts a batch hits.
    """
    load_variance: float = 0.0
    """The same over many passes: how uneven the ranks' loads are."""
    ttft_log_sd: float = 0.0
    """Standard deviations of log(measured / predicted) on groups left out, as
    EngineEfficiency's.
    """
    tpot_log_sd: float = 0.0
    throughput_log_sd: float = 0.0
    fitted_on: str = ""


ISOLATED_EXPERTS = ExpertEfficiency()


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsEfficiency(Strict):
    """Overheads of an engine started with its defaults relative to a tuned one."""

    slowdown: float
    """Passes against those of tuned engines: kernels and fusions that must be chosen by hand."""
    ttft_log_sd: float
    """Standard deviations of log(measured / predicted) on models left out."""
    tpot_log_sd: float
    throughput_log_sd: float
    fitted_on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEfficiency(Strict):
    """Overheads of separate pools, for any engine."""

    handover_s: float
    """Seconds of a request between the pools in addition to its bytes: routers, connections,
    scheduling.
    """
    ttft_log_sd: float
    """Standard deviations of log(measured / predicted) on pools left out, as EngineEfficiency's."""
    tpot_log_sd: float
    throughput_log_sd: float
    fitted_on: str
