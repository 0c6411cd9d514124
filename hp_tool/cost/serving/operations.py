"""Seconds of the operations in a forward pass: matmuls with few rows, cached attention, and small
collectives.

Layers with a sliding window attend to, and cache, only the last w tokens. Attention time is the
mean over the layers. Engines free keys and values that a windowed layer no longer needs (vLLM's
hybrid cache manager, TensorRT-LLM's variable windows, SGLang's separate pools).
"""

import math

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray
from hp_tool.cost.matrices import attention_flops, cached_width
from hp_tool.cost.matrix import Shape
from hp_tool.cost.network import adjacent_group, exchange_slowdown, group_ring, local_bandwidth
from hp_tool.cost.precision import ELEMENT_BYTES
from hp_tool.cost.recurrent import state_numbers
from hp_tool.cost.roofline import additive_seconds, peak_flops, roofline_seconds
from hp_tool.cost.scans import STATE_BYTES
from hp_tool.cost.serving.cache import (
    block_tokens,
    cached_layers,
    laid_out_bytes,
    shared_page,
    token_numbers,
    windowed_layers,
)
from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.domain.efficiency import Roofline, ThinRoofline
from hp_tool.domain.hardware import Precision
from hp_tool.domain.model import ModelSpec


def seen_tokens(model: ModelSpec, tokens: float) -> float:
    """Return the number of tokens in a context that a layer attends to, averaged over the layers.

    It is (F n + W min(n, w)) / L, for F layers without a window and W layers with a window w.
    """
    windowed = windowed_layers(model)
    if not windowed or model.sliding_window is None:
        return tokens
    layers = model.num_hidden_layers
    return ((layers - windowed) * tokens + windowed * min(tokens, model.sliding_window)) / layers


def read_tokens(case: ServingCase, t: IntArray, tokens: float) -> float | FloatArray:
    """Return the number of cached tokens that attention reads for a sequence of this length,
    averaged over the layers.
    """
    kinds = case.model.kinds
    if len(kinds) == 1:
        return seen_tokens(kinds[0][1], tokens)
    read = per_token = np.zeros(np.shape(t))
    for layers, kind in kinds:
        width = layers * cached_width(kind, t)
        per_token = per_token + width
        read = read + width * seen_tokens(kind, tokens)
    return read / per_token


def cached_tokens(
    case: ServingCase,
    t: IntArray,
    tokens: float,
    *,
    chunk: Floats = 0.0,
    shared: bool = False,
) -> float | FloatArray:
    """Return the number of cache tokens that a sequence of this length occupies, averaged over the
    layers.

    Sliding windows reduce the number. Recurrent layers add their states, converted to tokens of the
    other layers. Some engines need more, because they pad layers to equal sizes or divide the cache
    among kinds of layers (`laid_out_bytes`).

    Args:
        case: Model and engine.
        t: Number of ranks that split the heads; shape (n,).
        tokens: Tokens of the sequence.
        chunk: Prompt tokens that vLLM's windowed layers cache in addition to their window.
        shared: Count only tokens that another request with the same tokens can reuse, without
            states.
    """
    laid_out = laid_out_bytes(case, t, tokens, chunk=chunk, shared=shared)
    if laid_out is not None:
        return laid_out / (token_numbers(case, t) * case.kv_element_bytes)
    kinds = case.model.kinds
    cached = read_tokens(case, t, tokens)
    if shared or len(kinds) == 1:
        return cached
    states = sum(layers * state_numbers(kind, t) for layers, kind in kinds)
    per_token = sum(layers * cached_width(kind, t) for layers, kind in kinds)
    kept = states * STATE_BYTES / case.kv_element_bytes / per_token
    return np.asarray(cached + kept, dtype=np.float64)


def requests_in_cache(case: ServingCase, t: IntArray, room: Floats, tokens: float) -> Floats:
    """Return the number of sequences of this length that fit in a cache with room for `room`
    tokens.

    n requests in G prefix groups share min(n, G) prefixes. Let w be the tokens of a request and p
    those of a prefix. Up to G requests take n w tokens; more requests take G p + n (w - p) tokens.
    """
    whole = cached_tokens(case, t, tokens)
    apart = room / whole
    if not case.prefix_cache_hit_rate or math.isinf(case.prefix_groups):
        return apart
    prefix = shared_tokens(case, t)
    together = (room - case.prefix_groups * prefix) / (whole - prefix)
    return np.where(apart <= case.prefix_groups, apart, together)


def shared_tokens(case: ServingCase, t: IntArray) -> float | FloatArray:
    """Return the number of cache tokens that one prefix occupies."""
    length = case.prefix_cache_hit_rate * case.input_length
    return cached_tokens(case, t, length, shared=True)


def state_block(case: ServingCase) -> int:
    """Return the number of tokens per vLLM cache block for a model with recurrent layers; 1 for
    other models, whose cached prefixes may end at any token.

    The keys and values of a block in one layer are as large as the state of a recurrent layer on
    one rank.
    """
    layers = cached_layers(case, np.ones(1, dtype=np.int64))
    attention = [each for each in layers if each.token_bytes.any()]
    if not attention or len(attention) == len(layers):
        return 1
    page = shared_page(layers)
    return int(max(block_tokens(each, page)[0] for each in attention))


def prefill_keys(model: ModelSpec, *, length: float, cached: float) -> float:
    """Return the number of keys that a computed prompt token attends to, averaged over tokens and
    layers.

    Tokens are at positions from `cached` to `length` (causal). Without a window the mean is (cached
    + length) / 2.
    """
    full = 0.5 * (cached + length)
    windowed = windowed_layers(model)
    if not windowed or model.sliding_window is None:
        return full
    layers, inside = (
        model.num_hidden_layers,
        visible_keys(length, cached=cached, most=float(model.sliding_window)),
    )
    return ((layers - windowed) * full + windowed * inside) / layers


def visible_keys(length: float, *, cached: float = 0.0, most: float = np.inf) -> float:
    """Return the number of keys that a prompt token attends to, averaged over the positions from
    `cached` to `length`. Each token attends to at most `most` keys.
    """
    if length <= most or length <= cached:
        return min(0.5 * (cached + length), most)
    if cached >= most:
        return most
    return (0.5 * (most**2 - cached**2) + most * (length - most)) / (length - cached)


OUTPUT_BYTES = 2.0
"""Bytes per element of a layer's outputs, in 16 bits."""


def thin_roofline(case: ServingCase, precision: Precision) -> Roofline:
    """Return the roofline constants of matmuls with any number of rows.

    A precision without measurements uses the constants of bf16, scaled by the peaks in the
    datasheet.
    """
    roofs = case.profile.gpu.thin_matmul or case.profile.gpu.matmul
    return roofs.get(precision, roofs["bf16"])


def matmuls_seconds(
    case: ServingCase,
    tokens: FloatArray,
    matrices: list[Shape],
    *,
    precision: Precision | None = None,
    weight_bytes: float | None = None,
) -> FloatArray:
    """Return the time in seconds of y[tokens, n] = x[tokens, k] w[n, k]^T for each (n, k).

    A matmul has 2 x tokens x n x k FLOPs and reads the weights once, in their stored precision. For
    precisions below 16 bits, a kernel first quantises x, unless the engine fuses this step with
    another kernel.
    """
    compute = precision or case.compute_precision
    stored = case.weight_bytes if weight_bytes is None else weight_bytes
    gpu = case.cluster.gpu
    roof, peak, element = (
        thin_roofline(case, compute),
        peak_flops(gpu, precision=compute),
        ELEMENT_BYTES[compute],
    )
    rows_s = tokens * (2.0 / (roof.peak_fraction * peak))  # arithmetic per weight
    per_byte = 1.0 / (roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second)
    moved_s = tokens * per_byte
    weight_s, seconds = stored * per_byte, np.zeros(np.shape(tokens))
    p, overhead_s, depth_s, cast_s = None, roof.overhead_s, 0.0, 0.0
    if isinstance(roof, ThinRoofline):
        p, depth_s = roof.sharpness, roof.depth_s
        if element < OUTPUT_BYTES:
            overhead_s += case.engine.cast_share * roof.cast_s
            cast_s = case.engine.cast_share * roof.cast_passes * (OUTPUT_BYTES + element)
    for n, k in matrices:
        weights = n * k
        arithmetic, memory = (
            weights * rows_s,
            weights * weight_s + moved_s * (element * k + OUTPUT_BYTES * n),
        )
        longer = (
            np.maximum(arithmetic, memory)
            if p is None
            else (arithmetic**p + memory**p) ** (1.0 / p)
        )
        seconds = seconds + longer + (overhead_s + depth_s * k)
        if cast_s:
            seconds = seconds + moved_s * (cast_s * k)
    return case.engine.matmul_slowdown * seconds


def attention_seconds(
    case: ServingCase,
    t: IntArray,
    *,
    decoding: FloatArray,
    context: float,
    prefill_requests: FloatArray,
    drafted: int = 0,
) -> FloatArray:
    """Return the time in seconds of one layer's attention, averaged over layers with and without a
    window.

    Each of the `decoding` sequences attends to `context` cached tokens, and prompts of I tokens
    attend to themselves. Decoding reads each cached element once for all tokens of a sequence (the
    next token and the drafted tokens). Prefill computes half of I^2 scores (causal), minus the
    prefix cache, and reads or writes Q, K, V and O once. A part that a pass does not have (decoding
    or prompts) takes no time.
    """
    model, gpu, profile = case.model, case.cluster.gpu, case.profile.gpu
    # Attention runs in 16 bits even if the matmuls are quantised.
    peak = peak_flops(
        gpu,
        precision="fp32"
        if gpu.kind == "cpu"
        else "bf16"
        if "bf16" in gpu.peak_flops_per_second
        else "fp16",
    )
    width = cached_width(model, t)
    seen = decoding * seen_tokens(model, context)
    widened = case.engine.narrow_cache_slowdown if case.kv_element_bytes < OUTPUT_BYTES else 1.0
    decode = roofline_seconds(
        seen * (1 + drafted) * attention_flops(model, t, decoding=True),
        seen * width * case.kv_element_bytes * widened,
        profile.decode_attention or profile.attention,
        gpu=gpu,
        peak=peak,
    )
    length = float(case.input_length)
    head = (
        model.head_size
        if model.attention == "latent"
        else 0.5 * (model.head_size + model.v_head_size)
    )
    rows = prefill_requests * case.computed_length
    prefill = additive_seconds(
        rows
        * prefill_keys(model, length=length, cached=length - case.computed_length)
        * attention_flops(model, t, decoding=False),
        rows * OUTPUT_BYTES * (2.0 * model.num_attention_heads / t * head + width),
        profile.attention,
        gpu=gpu,
        peak=peak,
    )
    return case.engine.attention_slowdown * (
        (decoding > 0.0) * decode + (prefill_requests > 0.0) * prefill
    )


def all_reduce_seconds(
    case: ServingCase, message_bytes: FloatArray, *, group_size: IntArray
) -> FloatArray:
    """Return the time in seconds of the faster of two all-reduces: a ring, or (inside one NVLink
    domain) a single kernel that reads the memory of its peers.

    The result is zero for a group of one.
    """
    n = group_size
    wire = 2.0 * message_bytes * (n - 1.0) / n
    seconds = group_ring(machine=case, group=adjacent_group(n, cluster=case.cluster)).seconds(wire)
    small = case.profile.gpu.small_all_reduce
    if small is not None and case.cluster.gpu.peer_to_peer:
        bandwidth = small.bandwidth_fraction * local_bandwidth(case.cluster.gpu)
        direct = small.latency_s + small.latency_per_peer_s * (n - 1.0) + wire / bandwidth
        seconds = np.where(
            n <= case.cluster.nvlink_domain_size, np.minimum(seconds, direct), seconds
        )
    return case.engine.communication_slowdown * np.where(n > 1, seconds, 0.0)


def exchange_seconds(
    case: ServingCase, near_bytes: FloatArray, far_bytes: FloatArray, *, group_size: IntArray
) -> FloatArray:
    """Return the time of an all-to-all among `group_size` neighbouring ranks, in seconds; zero for
    a group of one.

    Each rank sends `near_bytes` inside its NVLink domain and, at the same time, `far_bytes` through
    its network port.
    """
    n, domain = group_size, case.cluster.nvlink_domain_size
    link, network = case.profile.gpu.all_to_all, case.profile.framework.network
    peers = link.bandwidth_fraction * local_bandwidth(case.cluster.gpu)
    ramped = near_bytes + np.sqrt(near_bytes * link.ramp_bytes)
    local = link.latency_per_peer_s * (np.minimum(n, domain) - 1.0) + ramped / peers
    slowed = exchange_slowdown(
        adjacent_group(n, cluster=case.cluster),
        in_domain=np.minimum(n, domain),
        cluster=case.cluster,
    )
    port = network.bandwidth_fraction * case.cluster.inter_node_bandwidth_bytes_per_second
    remote = network.latency_s + case.cluster.inter_node_latency_s + far_bytes * slowed / port
    seconds = link.latency_s + np.where(n > domain, np.maximum(local, remote), local)
    return case.engine.communication_slowdown * np.where(n > 1, seconds, 0.0)
