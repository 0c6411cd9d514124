"""Seconds of one forward pass through all layers and the output layer, for dense and MoE models."""

from dataclasses import replace

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray
from hp_tool.cost.matrices import mixer_matrices, mlp_matrices
from hp_tool.cost.matrix import shapes, shapes_by_source
from hp_tool.cost.network import adjacent_group, send_seconds
from hp_tool.cost.serving.candidates import Pass, ServingCandidates, ServingCase
from hp_tool.cost.serving.experts import SENDING_SHARE, exchange, experts_seconds
from hp_tool.cost.serving.mixers import (
    chosen_attention_seconds,
    index_seconds,
    mixer_log_sd,
    mixer_seconds,
)
from hp_tool.cost.serving.operations import (
    OUTPUT_BYTES,
    all_reduce_seconds,
    attention_seconds,
    matmuls_seconds,
)
from hp_tool.domain.hardware import Precision

WIDE_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
ELEMENTWISE_BYTES = 20.0
"""Bytes that a layer's elementwise kernels move per token and hidden unit, in 16 bits.

Two fused kernels for residual and norm read two tensors and write two; the projections' input is
read once more. Rotary positions and writes to the cache are part of the timed attention.
"""


SQUARE_BYTES = 4.0
"""Bytes of a sum of squares, in fp32."""


def forward_seconds(
    case: ServingCase, candidates: ServingCandidates, batch: Pass, *, context: float
) -> FloatArray:
    """Return the time in seconds of all layers, and of the output layer for each sequence that
    generates a token.

    With pipeline parallelism, this is the latency through all stages. Each stage is busy for 1/p of
    this time.
    """
    model = case.model
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    message = batch.tokens * model.hidden_size * OUTPUT_BYTES
    reduce = all_reduce_seconds(case, message, group_size=t)
    seconds, *others = (
        _layer_seconds(case.with_layers(kind), candidates, batch, context, reduce=reduce)
        for _, kind in model.kinds
    )
    for each in others:
        seconds = seconds + each
    rows = batch.decoding * (1 + batch.drafted) + batch.prefill_requests
    output = matmuls_seconds(
        case,
        rows,
        [(model.vocab_size / t, float(model.hidden_size))],
        precision=_head_precision(case),
        weight_bytes=OUTPUT_BYTES,
    )
    distance = t * candidates.attention_data_parallel_size
    # The receiver is in another domain if and only if the distance is at least the number of
    # ranks per domain.
    crosses = distance >= adjacent_group(distance, cluster=case.cluster).domain.size
    hop = send_seconds(message / t, machine=case, distance=distance, crosses=crosses)
    return case.slowdown * (seconds + output + np.where(p > 1, (p - 1.0) * hop, 0.0))


def _layer_seconds(
    case: ServingCase,
    candidates: ServingCandidates,
    batch: Pass,
    context: float,
    *,
    reduce: FloatArray,
) -> FloatArray:
    """Return the time of all layers of one kind, in seconds.

    `reduce` is the time in seconds of the all-reduce after attention or after an MLP.
    """
    model, t = case.model, candidates.tensor_parallel_size
    layers = model.num_hidden_layers
    attention = _mixer_block(case, candidates, batch, context)
    if model.mixer != "none":
        attention = attention + reduce + _norm_seconds(case, t, batch.tokens)
    if model.num_experts:
        return layers * _moe_layer_seconds(
            case, candidates, batch, context, attention=attention, reduce=reduce
        )
    seconds = layers * attention
    if model.feed_forward != "none":
        dense = matmuls_seconds(case, batch.tokens, shapes(mlp_matrices(model, tensor=t))) + reduce
        # The activation between the MLP's matrices reads the output of the first and writes the
        # input of the second.
        moved = OUTPUT_BYTES * (model.mlp_inputs + 1.0) * model.ffn_size / t
        dense = dense + batch.tokens * moved / _reached_bandwidth(case)
        seconds = seconds + layers * dense
    return seconds


def _norm_seconds(case: ServingCase, t: IntArray, tokens: FloatArray) -> Floats:
    """Return the time in seconds of query and key norms over all heads if the heads are split
    across ranks.

    One kernel computes sums of squares, an all-reduce adds two fp32 numbers per token, and another
    kernel normalises (sgl-project/sglang#14416, vllm-project/vllm#31493). Other norms are part of
    the layer's overhead.
    """
    if case.model.query_key_norm != "all_heads" or case.model.mixer != "attention":
        return 0.0
    reduce = all_reduce_seconds(case, 2.0 * SQUARE_BYTES * tokens, group_size=t)
    return np.where(t > 1, reduce + 2.0 * case.profile.gpu.kernel_overhead_s, 0.0)


def _mixer_block(
    case: ServingCase, candidates: ServingCandidates, batch: Pass, context: float
) -> FloatArray:
    """Return the time in seconds of one layer's token mixer, including its projections, elementwise
    kernels and overhead.
    """
    model, t = case.model, candidates.tensor_parallel_size
    share = (
        0.5 if "none" in (model.mixer, model.feed_forward) else 1.0
    )  # one norm and residual instead of two
    elementwise = (
        batch.tokens * (share * ELEMENTWISE_BYTES * model.hidden_size) / _reached_bandwidth(case)
    )
    if model.mixer == "none":
        return elementwise + share * case.engine.layer_overhead_s
    projections = matmuls_seconds(
        case,
        batch.tokens,
        shapes_by_source(mixer_matrices(model, tensor=t)),
        precision=case.mixer_precision,
        weight_bytes=case.mixer_bytes,
    )
    return (
        projections
        + _core_seconds(case, t, batch, context)
        + elementwise
        + share * case.engine.layer_overhead_s
    )


def _core_seconds(case: ServingCase, t: IntArray, batch: Pass, context: float) -> FloatArray:
    """Return the time in seconds of one layer's attention core or recurrence (no projections)."""
    decoding, prompts, drafted = batch.decoding, batch.prefill_requests, batch.drafted
    tokens = prompts * case.computed_length
    if case.model.is_recurrent:
        return mixer_seconds(
            case, t, decoding=decoding, prompt_tokens=tokens, prompts=prompts, drafted=drafted
        )
    if case.model.index_topk is None:
        return attention_seconds(
            case, t, decoding=decoding, context=context, prefill_requests=prompts, drafted=drafted
        )
    seconds, chosen = (
        part(case, t, decoding=decoding, context=context, prompt_tokens=tokens, drafted=drafted)
        for part in (index_seconds, chosen_attention_seconds)
    )
    return case.engine.attention_slowdown * (seconds + chosen)


def mixers_log_sd(
    case: ServingCase, candidates: ServingCandidates, batch: Pass, *, context: float
) -> FloatArray:
    """Return the part of the standard deviation of log(measured / predicted) of a pass that is due
    to token mixers without measured runs; 0 for models without them.

    It is the deviation of recurrent and sparse-attention kernels times their fraction of the pass,
    as if all of them had a common error.
    """
    doubted = np.zeros(len(candidates))
    for layers, kind in case.model.kinds:
        own = case.with_layers(kind)
        if sd := mixer_log_sd(own):
            doubted = doubted + layers * sd * _core_seconds(
                own, candidates.tensor_parallel_size, batch, context
            )
    return doubted / forward_seconds(case, candidates, batch, context=context)


def _reached_bandwidth(case: ServingCase) -> float:
    return case.profile.gpu.memory_fraction * case.cluster.gpu.memory_bandwidth_bytes_per_second


def _moe_layer_seconds(
    case: ServingCase,
    candidates: ServingCandidates,
    batch: Pass,
    context: float,
    *,
    attention: FloatArray,
    reduce: FloatArray,
) -> FloatArray:
    """Return the time of one MoE layer, in seconds.

    With one attention group, an all-reduce sums the results of its ranks, as after a dense MLP
    (`reduce`). With several groups, dispatch and combine exchange tokens with the experts. With
    two-batch overlap, one half of the batch computes while the tokens of the other half are
    exchanged. Let a, d, e and c be the times of attention, dispatch, experts and combine. A layer
    then takes max(a, c) + max(d, a) + max(e, d) + max(c, e). Kernels that send prompt tokens occupy
    some of the SMs during this time.
    """
    d = candidates.attention_data_parallel_size
    dispatch, combine = exchange(case, candidates, batch)
    routed = batch.tokens if batch.routed is None else batch.routed
    plain = (
        attention
        + experts_seconds(case, candidates, routed)
        + np.where(d > 1, dispatch + combine, reduce)
    )
    spans = candidates.tensor_parallel_size * d > case.cluster.nvlink_domain_size
    turns = (d > 1) & (spans if case.two_batch_overlap is None else case.two_batch_overlap)
    if not np.any(turns):
        return plain
    half = replace(
        batch,
        tokens=0.5 * batch.tokens,
        decoding=0.5 * batch.decoding,
        prefill_requests=0.5 * batch.prefill_requests,
    )
    dispatch, combine = exchange(case, candidates, half)
    shrunk = 1.0 / (1.0 - SENDING_SHARE * (batch.prefill_requests > 0.0))
    within = all_reduce_seconds(
        case,
        half.tokens * case.model.hidden_size * OUTPUT_BYTES,
        group_size=candidates.tensor_parallel_size,
    )
    attention = shrunk * _mixer_block(case, candidates, half, context) + within
    experts = shrunk * experts_seconds(case, candidates, 0.5 * routed)
    phases = np.maximum(attention, combine) + np.maximum(dispatch, attention)
    phases = phases + np.maximum(experts, dispatch) + np.maximum(combine, experts)
    return np.where(
        turns, np.minimum(plain, phases) if case.two_batch_overlap is None else phases, plain
    )


def _head_precision(case: ServingCase) -> Precision:
    supported = case.cluster.gpu.peak_flops_per_second
    return next(name for name in WIDE_PRECISIONS if name in supported)
