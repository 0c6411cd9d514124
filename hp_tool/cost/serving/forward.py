"""Seconds of one forward pass through all layers and the output layer, with or without experts."""

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray
from hp_tool.cost.network import neighbours, send_seconds
from hp_tool.cost.parameters import (
    attention_matrices,
    entries,
    expert_matrices,
    mlp_matrices,
    router_matrix,
    shapes,
    shapes_by_source,
    shared_expert_matrices,
)
from hp_tool.cost.roofline import ELEMENT_BYTES, peak_flops, roofline_seconds
from hp_tool.cost.serving.candidates import Pass, ServingCandidates, ServingCase
from hp_tool.cost.serving.operations import (
    OUTPUT_BYTES,
    all_reduce_seconds,
    attention_seconds,
    exchange_seconds,
    matmuls_seconds,
    thin_roof,
)
from hp_tool.domain.hardware import Precision


def active_experts(tokens: FloatArray, *, experts: int, top_k: int) -> FloatArray:
    """Expected number of experts that at least one of `tokens` picks, with uniform routing: E (1 - (1 - k/E)^tokens)."""
    missed = np.log1p(-min(top_k / experts, 1.0 - 1e-12))
    hit: FloatArray = -experts * np.expm1(tokens * missed)
    return hit


def imbalance(load: FloatArray, *, ranks: IntArray) -> FloatArray:
    """Tokens of the busiest of `ranks` over their mean `load`.

    1 + sqrt(2 ln(ranks) / load), the expected largest of so many Poisson counts, and at most all tokens on one rank.
    """
    return np.minimum(1.0 + np.sqrt(2.0 * np.log(ranks) / np.maximum(load, 1e-9)), ranks)


def expert_weights(case: ServingCase, candidates: ServingCandidates) -> Floats:
    """Routed weights of one layer on one rank: E experts spread over all ranks of the stage, whole or split."""
    model = case.model
    ranks = candidates.tensor_parallel_size * candidates.attention_data_parallel_size
    return entries(expert_matrices(model)) / ranks


def experts_seconds(case: ServingCase, candidates: ServingCandidates, tokens: FloatArray) -> FloatArray:
    """Seconds of router, shared and routed experts of one layer.

    `tokens` are those of one scheduler; the stage's experts process the tokens of all d.
    """
    model, gpu = case.model, case.cluster.gpu
    count, top_k = model.num_experts or 1, model.num_experts_per_tok or 1
    t, d, e = candidates.tensor_parallel_size, candidates.attention_data_parallel_size, candidates.expert_parallel_size
    split = t * d / e  # ranks that share the matrices of one expert
    everyone = tokens * d
    load = everyone * top_k / e
    busiest = load * imbalance(load, ranks=e)
    expert = entries(expert_matrices(model)) / count / split
    local = active_experts(everyone, experts=count, top_k=top_k) / e
    read = case.weight_bytes * expert * np.maximum(local, 1.0)
    moved = busiest * (2.0 * model.hidden_size * ELEMENT_BYTES[case.compute_precision] + 6.0 * model.expert_size / split)
    routed = roofline_seconds(
        2.0 * busiest * expert,
        read + moved,
        thin_roof(case, case.compute_precision),
        gpu=gpu,
        peak=peak_flops(gpu, precision=case.compute_precision),
    )
    shared = shapes(shared_expert_matrices(model, tensor=t))
    always = matmuls_seconds(case, tokens, shared) if model.num_shared_experts else 0.0
    router = matmuls_seconds(case, tokens, [router_matrix(model).shape])
    # Beyond the first grouped matmul's launch: the second one, and sorting the tokens by expert and back.
    launches = 3.0 * case.profile.gpu.kernel_overhead_s
    return case.engine.matmul_slowdown * (routed + launches) + always + router


WIDE_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
ELEMENTWISE_BYTES = 20.0
"""Bytes per token and hidden unit of a layer, in 16 bits: two fused residual-and-norm kernels (two reads, two writes each), and
the input of the projections once more."""


def forward_seconds(case: ServingCase, candidates: ServingCandidates, batch: Pass, *, context: float) -> FloatArray:
    """Seconds of all layers, one after the other, and of the output layer for every sequence that gets a token.

    With pipeline parallelism this is the latency through all stages; a stage is busy for its p-th part.
    """
    model, gpu = case.model, case.cluster.gpu
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    layers, mixtures = model.num_hidden_layers, model.moe_layers
    tokens = batch.tokens
    projections = matmuls_seconds(case, tokens, shapes_by_source(attention_matrices(model, tensor=t)))
    core = attention_seconds(
        case,
        t,
        decoding=batch.decoding,
        context=context,
        prefill_requests=batch.prefill_requests,
        drafted=batch.drafted,
    )
    reached = case.profile.gpu.memory_fraction * gpu.memory_bandwidth_bytes_per_second
    elementwise = tokens * (ELEMENTWISE_BYTES * model.hidden_size) / reached + case.engine.layer_overhead_s
    message = tokens * model.hidden_size * OUTPUT_BYTES
    reduce = all_reduce_seconds(case, message, group_size=t)
    seconds = layers * (projections + core + elementwise + reduce)
    if layers > mixtures:
        dense = matmuls_seconds(case, tokens, shapes(mlp_matrices(model, tensor=t))) + reduce
        seconds = seconds + (layers - mixtures) * dense
    if mixtures:
        exchange = _expert_exchange(case, candidates, tokens, reduce)
        seconds = seconds + mixtures * (experts_seconds(case, candidates, tokens) + exchange)
    rows = batch.decoding * (1 + batch.drafted) + batch.prefill_requests
    output = matmuls_seconds(case, rows, [(model.vocab_size / t, float(model.hidden_size))], precision=_head_precision(case),
                             weight_bytes=OUTPUT_BYTES)  # fmt: skip
    distance = t * candidates.attention_data_parallel_size
    # The receiver sits in another domain exactly where a domain holds no more ranks than the distance.
    crosses = distance >= neighbours(distance, cluster=case.cluster).domain.size
    hop = send_seconds(message / t, machine=case, distance=distance, crosses=crosses)
    return seconds + output + np.where(p > 1, (p - 1.0) * hop, 0.0)


def _expert_exchange(case: ServingCase, candidates: ServingCandidates, tokens: FloatArray, reduce: FloatArray) -> FloatArray:
    """Seconds to bring tokens to experts and back.

    With one attention group the all-reduce of any MLP (`reduce`); with several, an all-to-all to the experts' ranks and one
    back: a token goes to each of its top-k experts' groups of ranks once.
    """
    model = case.model
    t, d = candidates.tensor_parallel_size, candidates.attention_data_parallel_size
    message = tokens * model.hidden_size * OUTPUT_BYTES
    ranks = t * d
    e = candidates.expert_parallel_size
    copies = np.minimum(float(model.num_experts_per_tok or 1), e) * ranks / e
    routed = 2.0 * exchange_seconds(case, message / t * copies, group_size=ranks)
    return np.where(d > 1, routed, reduce)


def _head_precision(case: ServingCase) -> Precision:
    """Precision of the output layer, which is not quantised."""
    supported = case.cluster.gpu.peak_flops_per_second
    return next(name for name in WIDE_PRECISIONS if name in supported)
