"""Bytes on one device of the fullest stage: weights, working set, and the room for keys and
values.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray
from hp_tool.cost.matrices import (
    cached_width,
    latent_matrices,
    mixer_matrices,
    mlp_matrices,
    shared_expert_matrices,
)
from hp_tool.cost.matrix import entries
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.experts import expert_weights
from hp_tool.domain.model import ModelSpec

WIDE_BYTES = 2.0
"""Embeddings, output layer and activations are in 16 bits."""
LOGIT_BYTES = 4.0
"""Samplers use fp32 logits of every running sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBytes:
    """Bytes on one device; shape (n,)."""

    weights: FloatArray
    activations: FloatArray
    logits: FloatArray
    overhead: FloatArray
    kv_per_token: FloatArray
    """Keys and values of one token."""
    kv_capacity: FloatArray
    """Room for keys and values; negative if the weights alone do not fit."""
    capacity: float
    """Bytes that the engine may use."""


def serving_bytes(case: ServingCase, candidates: ServingCandidates) -> ServingBytes:
    """Memory before any request; the engine uses its `memory_fraction` of the device, or of what
    the rest leaves free.
    """
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    layers = np.ceil(case.model.num_hidden_layers / p)
    weights, working = weight_bytes(case, candidates), activation_bytes(case, candidates)
    logits = LOGIT_BYTES * candidates.max_num_seqs * case.model.vocab_size / t
    overhead = np.full(len(candidates), case.engine.reserve_bytes)
    fixed = weights + working + logits + overhead
    capacity, memory_fraction = float(case.cluster.gpu.memory_bytes), case.engine.memory_fraction
    if case.engine.memory_fraction_of == "device":
        capacity = memory_fraction * capacity
        room = capacity - fixed
    else:
        room = memory_fraction * (capacity - fixed)
    return ServingBytes(
        weights=cast(FloatArray, weights),
        activations=working,
        logits=logits,
        overhead=overhead,
        kv_per_token=layers * _mean_width(case.model, t) * case.kv_element_bytes,
        kv_capacity=room,
        capacity=capacity,
    )


def weight_bytes(case: ServingCase, candidates: ServingCandidates) -> Floats:
    """Bytes of a p-th of the layers, rounded up, and on the fuller end the embedding or output
    layer (both if p = 1), and the towers, which the tensor-parallel ranks divide.
    """
    model = case.model
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    weights = sum(_layers_bytes(case.of(kind), candidates) for _, kind in model.kinds)
    stage = np.ceil(model.num_hidden_layers / p) / model.num_hidden_layers * weights
    beside = WIDE_BYTES * model.tower_parameters / t if model.tower_parameters else 0.0
    return (
        stage
        + _ends(case, t) * np.where(p == 1, 1.0 if model.tie_word_embeddings else 2.0, 1.0)
        + beside
    )


def _layers_bytes(case: ServingCase, candidates: ServingCandidates) -> Floats:
    """Bytes on one rank of the matrices of all layers of one kind, dense ones and those with
    experts.
    """
    model, t = case.model, candidates.tensor_parallel_size
    layers, mixtures = model.num_hidden_layers, model.moe_layers
    matrices = layers * entries(mixer_matrices(model, tensor=t))
    if model.feed_forward != "none":
        matrices = matrices + (layers - mixtures) * entries(mlp_matrices(model, tensor=t))
    weights = matrices * case.weight_bytes
    if mixtures:
        shared = entries([*shared_expert_matrices(model, tensor=t), *latent_matrices(model)])
        weights = (
            weights + mixtures * (expert_weights(case, candidates) + shared) * case.expert_bytes
        )
    return weights


def _mean_width(model: ModelSpec, t: IntArray) -> Floats:
    """Numbers that a token takes in the cache of one layer on one rank, mean over layers."""
    if len(model.kinds) == 1:
        return cached_width(model.kinds[0][1], t)
    return (
        sum(layers * cached_width(kind, t) for layers, kind in model.kinds)
        / model.num_hidden_layers
    )


def activation_bytes(case: ServingCase, candidates: ServingCandidates) -> FloatArray:
    """Working set of one layer for a full batch of tokens.

    Residual, normed input and attention output, then the MLP's widest tensors.
    """
    model = case.model
    t, tokens = candidates.tensor_parallel_size, candidates.max_num_batched_tokens
    gates = model.mlp_inputs + 1.0
    width = max(
        max(
            kind.ffn_size,
            (kind.num_experts_per_tok or 0) * kind.expert_size if kind.num_experts else 0,
        )
        for _, kind in model.kinds
    )
    working: FloatArray = tokens * WIDE_BYTES * (4.0 * model.hidden_size + gates * width / t)
    return working


def _ends(case: ServingCase, t: IntArray) -> FloatArray:
    """Bytes of the embedding or the output layer on one rank: V h / t in 16 bits."""
    ends: FloatArray = WIDE_BYTES * case.model.vocab_size * case.model.hidden_size / t
    return ends
