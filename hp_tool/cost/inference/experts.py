"""One mixture-of-experts MLP in a forward pass: routed experts by how many are hit, their imbalance, their exchange."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.compute import ELEMENT_BYTES, peak_flops, roofline_seconds
from hp_tool.cost.elementwise import FloatArray, IntArray
from hp_tool.cost.inference.candidates import ServingCandidates, ServingNouns
from hp_tool.cost.inference.matrices import mlp_matrices, moe_width, weights
from hp_tool.cost.inference.operations import matmuls_seconds, thin_roof


def active_experts(tokens: FloatArray, *, experts: int, top_k: int) -> FloatArray:
    """Expected number of experts that at least one of `tokens` picks, routing spread evenly: E (1 - (1 - k/E)^tokens)."""
    missed = np.log1p(-min(top_k / experts, 1.0 - 1e-12))
    hit: FloatArray = -experts * np.expm1(tokens * missed)
    return hit


def imbalance(load: FloatArray, *, ranks: IntArray) -> FloatArray:
    """Tokens of the busiest of `ranks` over their mean `load`: 1 + sqrt(2 ln(ranks) / load), the largest of so many Poisson
    counts, never more than all tokens on one rank.
    """
    return np.minimum(1.0 + np.sqrt(2.0 * np.log(ranks) / np.maximum(load, 1e-9)), ranks)


def expert_weights(nouns: ServingNouns, candidates: ServingCandidates) -> FloatArray:
    """Routed weights of one layer on one rank: E experts spread over all ranks of the stage, whole or split."""
    model = nouns.model
    ranks = candidates.tensor_parallel_size * candidates.attention_data_parallel_size
    return (model.num_experts or 0) * weights(mlp_matrices(model, float(moe_width(model)))) / ranks


def experts_seconds(nouns: ServingNouns, candidates: ServingCandidates, tokens: FloatArray) -> FloatArray:
    """Router, shared and routed experts of one layer; `tokens` are one scheduler's, the stage's experts see all d of them."""
    model, gpu = nouns.model, nouns.cluster.gpu
    count, top_k = model.num_experts or 1, model.num_experts_per_tok or 1
    t, d, e = candidates.tensor_parallel_size, candidates.attention_data_parallel_size, candidates.expert_parallel_size
    split = t * d / e  # ranks that share the matrices of one expert
    everyone = tokens * d
    load = everyone * top_k / e
    busiest = load * imbalance(load, ranks=e)
    expert = weights(mlp_matrices(model, float(moe_width(model)))) / split
    local = active_experts(everyone, experts=count, top_k=top_k) / e
    read = nouns.weight_bytes * expert * np.maximum(local, 1.0)
    moved = busiest * (2.0 * model.hidden_size * ELEMENT_BYTES[nouns.compute_precision] + 6.0 * moe_width(model) / split)
    routed = roofline_seconds(
        2.0 * busiest * expert,
        read + moved,
        thin_roof(nouns, nouns.compute_precision),
        gpu=gpu,
        peak=peak_flops(gpu, precision=nouns.compute_precision),
    )
    shared = model.shared_expert_size / t
    always = matmuls_seconds(nouns, tokens, mlp_matrices(model, shared)) if model.num_shared_experts else 0.0
    router = matmuls_seconds(nouns, tokens, ((float(count), float(model.hidden_size)),))
    # Beyond the first grouped matmul's launch: the second one, and sorting the tokens by expert and back.
    launches = 3.0 * nouns.profile.gpu.kernel_overhead_s
    return nouns.engine.matmul_slowdown * (routed + launches) + always + router
