"""Seconds of one forward pass through all layers and the output layer."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.communication import send_seconds
from hp_tool.cost.elementwise import FloatArray
from hp_tool.cost.inference.candidates import Pass, ServingCandidates, ServingNouns
from hp_tool.cost.inference.experts import experts_seconds
from hp_tool.cost.inference.matrices import attention_matrices, mlp_matrices, moe_layers
from hp_tool.cost.inference.operations import (
    OUTPUT_BYTES,
    all_reduce_seconds,
    attention_seconds,
    exchange_seconds,
    matmuls_seconds,
)
from hp_tool.domain.hardware import Precision

WIDE_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
ELEMENTWISE_BYTES = 20.0
"""Per token and hidden unit of a layer, in 16 bits: two fused residual-and-norm kernels (two reads, two writes each) and
the input of the projections once more."""


def forward_seconds(nouns: ServingNouns, candidates: ServingCandidates, batch: Pass, *, context: float) -> FloatArray:
    """All layers, one after the other, and the output layer for every sequence that gets a token.

    With pipeline parallelism this is the latency through all stages; a stage is busy for its p-th part.
    """
    model, gpu = nouns.model, nouns.cluster.gpu
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    layers, mixtures = model.num_hidden_layers, moe_layers(model)
    tokens = batch.tokens
    projections = matmuls_seconds(nouns, tokens, attention_matrices(model, t))
    core = attention_seconds(
        nouns,
        t,
        decoding=batch.decoding,
        context=context,
        prefill_requests=batch.prefill_requests,
        drafted=batch.drafted,
    )
    reached = nouns.profile.gpu.memory_fraction * gpu.memory_bandwidth_bytes_per_second
    elementwise = tokens * (ELEMENTWISE_BYTES * model.hidden_size) / reached + nouns.engine.layer_overhead_s
    message = tokens * model.hidden_size * OUTPUT_BYTES
    reduce = all_reduce_seconds(nouns, message, group_size=t)
    seconds = layers * (projections + core + elementwise + reduce)
    if layers > mixtures:
        dense = matmuls_seconds(nouns, tokens, mlp_matrices(model, model.ffn_size / t)) + reduce
        seconds = seconds + (layers - mixtures) * dense
    if mixtures:
        exchange = _expert_exchange(nouns, candidates, tokens, reduce)
        seconds = seconds + mixtures * (experts_seconds(nouns, candidates, tokens) + exchange)
    rows = batch.decoding * (1 + batch.drafted) + batch.prefill_requests
    output = matmuls_seconds(nouns, rows, ((model.vocab_size / t, float(model.hidden_size)),), precision=_head_precision(nouns),
                             weight_bytes=OUTPUT_BYTES)  # fmt: skip
    distance = t * candidates.attention_data_parallel_size
    # The receiver sits in another domain exactly where a domain holds no more ranks than the distance.
    crosses = distance >= nouns.cluster.nvlink_domain_size
    hop = send_seconds(message / t, distance=distance, crosses=crosses, cluster=nouns.cluster, profile=nouns.profile)
    return seconds + output + np.where(p > 1, (p - 1.0) * hop, 0.0)


def _expert_exchange(nouns: ServingNouns, candidates: ServingCandidates, tokens: FloatArray, reduce: FloatArray) -> FloatArray:
    """What brings tokens to experts and back: with one attention group the all-reduce of any MLP (`reduce`); with several, an
    all-to-all to the experts' ranks and one back: a token goes to each of its top-k experts' groups of ranks once.
    """
    model = nouns.model
    t, d = candidates.tensor_parallel_size, candidates.attention_data_parallel_size
    message = tokens * model.hidden_size * OUTPUT_BYTES
    ranks = t * d
    e = candidates.expert_parallel_size
    copies = np.minimum(float(model.num_experts_per_tok or 1), e) * ranks / e
    routed = 2.0 * exchange_seconds(nouns, message / t * copies, group_size=ranks)
    return np.where(d > 1, routed, reduce)


def _head_precision(nouns: ServingNouns) -> Precision:
    """The output layer is not quantised."""
    known = nouns.cluster.gpu.peak_flops_per_second
    return next(name for name in WIDE_PRECISIONS if name in known)
