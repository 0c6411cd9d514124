"""Memory on one device of the pipeline stage that needs the most: weights, working set, and room
for the KV cache.
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray
from hp_tool.cost.matrices import (
    latent_matrices,
    mixer_matrices,
    mlp_matrices,
    shared_expert_matrices,
)
from hp_tool.cost.matrix import entries
from hp_tool.cost.serving.cache import drafting_layers, drafts_by_itself, token_numbers
from hp_tool.cost.serving.candidates import Drafter, ServingCandidates, ServingCase
from hp_tool.cost.serving.experts import expert_weights
from hp_tool.cost.serving.weights import MXFP4_BYTES

WIDE_BYTES = 2.0
"""Bytes per element of embeddings, output layer and activations, in 16 bits."""
MULTICAST = ("h100", "b200", "b300")
"""GPU types whose NVLink switches support multicast."""
PADDED_TO = 256
"""Multiple to which the Triton and Marlin kernels of vLLM and SGLang pad the hidden sizes of MXFP4
experts.

With padding, GPT-OSS 120B uses 64.4 GiB instead of 60.7 GiB.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBytes:
    """Bytes on one device; shape (n,)."""

    weights: FloatArray
    activations: FloatArray
    logits: FloatArray
    overhead: FloatArray
    kv_per_token: FloatArray
    """Bytes of the keys and values of one token."""
    kv_capacity: FloatArray
    """Bytes available for the KV cache; negative if the weights alone do not fit."""
    capacity: float
    """Bytes that the engine may use."""


def serving_bytes(case: ServingCase, candidates: ServingCandidates) -> ServingBytes:
    """Return the memory that an engine uses before any request arrives.

    Some engines use `memory_fraction` of the device. Others use this fraction of the remaining
    memory for the cache. vLLM (`profiled`) runs the encoder towers with their largest input, then
    one pass with the maximum number of tokens, then the sampler with the maximum number of
    sequences. It subtracts the highest of these peaks. SGLang (`outside`) places the working set
    and the sampler in the memory outside the fraction, and only what exceeds that memory is
    subtracted.
    """
    engine, device = case.engine, float(case.cluster.gpu.memory_bytes)
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    weights, working = weight_bytes(case, candidates), activation_bytes(case, candidates)
    logits = sampler_bytes(case, candidates)
    ranks = t * p * candidates.expert_parallel_size * candidates.attention_data_parallel_size
    overhead = engine.reserve_bytes + engine.communicator_bytes * (ranks > 1)
    if case.cluster.gpu.silicon in MULTICAST:
        overhead = overhead + engine.multicast_bytes * (ranks > 2)
    share = engine.memory_fraction * device if engine.memory_fraction_of == "device" else device
    if engine.working_set == "profiled":
        hidden = WIDE_BYTES * case.model.hidden_size * candidates.max_num_batched_tokens
        working = np.maximum(working, case.model.tower_working_bytes)
        sampled = hidden + logits > working
        working, logits = np.where(sampled, hidden, working), np.where(sampled, logits, 0.0)
    elif engine.working_set == "outside":
        left = np.minimum((device - share) / (working + logits), 1.0)
        working, logits = working * (1.0 - left), logits * (1.0 - left)
    room = share - (weights + working + logits + overhead)
    if engine.memory_fraction_of == "free":
        room = engine.memory_fraction * room
    return ServingBytes(
        weights=cast(FloatArray, weights),
        activations=working,
        logits=logits,
        overhead=cast(FloatArray, overhead),
        kv_per_token=cast(FloatArray, token_numbers(case, t, stages=p) * case.kv_element_bytes),
        kv_capacity=room,
        capacity=share,
    )


def sampler_bytes(case: ServingCase, candidates: ServingCandidates) -> FloatArray:
    """Return the bytes of the sampler on one rank.

    Each rank gathers the logits of the whole vocabulary for all running sequences, at most one per
    token of a pass.
    """
    sequences = np.minimum(candidates.max_num_seqs, candidates.max_num_batched_tokens)
    gathered: FloatArray = case.engine.sampler_bytes_per_logit * sequences * case.model.vocab_size
    return gathered


def weight_bytes(case: ServingCase, candidates: ServingCandidates) -> Floats:
    """Return the bytes of the weights on one rank of the largest pipeline stage. It has 1/p of the
    layers, rounded up, and an embedding or output layer (both if p = 1).

    Draft models and layers that draft tokens are included. Encoder towers are split across
    tensor-parallel ranks, unless they are replicated.
    """
    model = case.model
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    weights = sum(_layers_bytes(case.with_layers(kind), candidates) for _, kind in model.kinds)
    layers = np.ceil(model.num_hidden_layers / p) + drafting_layers(case)
    stage = layers / model.num_hidden_layers * weights
    ranks = 1 if model.tower_replicated else t
    beside: Floats = WIDE_BYTES * model.tower_parameters / ranks if model.tower_parameters else 0.0
    if case.drafter is not None:
        beside = beside + _drafter_bytes(case, case.drafter, candidates)
    elif drafts_by_itself(case):
        beside = beside + WIDE_BYTES * model.assistant_parameters / t
    return (
        stage
        + _end_layer_bytes(case, t)
        * np.where(p == 1, 1.0 if model.tie_word_embeddings else 2.0, 1.0)
        + beside
    )


def _drafter_bytes(case: ServingCase, drafter: Drafter, candidates: ServingCandidates) -> Floats:
    """Return the bytes of the draft model on one rank. Engines split it across ranks in the same
    way as the model.
    """
    each = drafter.layer_bytes
    apart = replace(case, mixer_bytes=each, weight_bytes=each, expert_bytes=each, drafter=None)
    layers = sum(
        _layers_bytes(apart.with_layers(kind), candidates) for _, kind in drafter.model.kinds
    )
    return layers + WIDE_BYTES * drafter.end_weights / candidates.tensor_parallel_size


def _layers_bytes(case: ServingCase, candidates: ServingCandidates) -> Floats:
    model, t = case.model, candidates.tensor_parallel_size
    layers = model.num_hidden_layers
    weights = layers * entries(mixer_matrices(model, tensor=t)) * case.mixer_bytes
    if model.num_experts:
        shared = entries([*shared_expert_matrices(model, tensor=t), *latent_matrices(model)])
        padded = PADDED_TO if case.expert_bytes == MXFP4_BYTES else 1
        routed = expert_weights(case, candidates) * (
            math.ceil(model.hidden_size / padded) * padded / model.hidden_size
        )
        weights = weights + layers * (routed + shared) * case.expert_bytes
    elif model.feed_forward != "none":
        weights = weights + layers * entries(mlp_matrices(model, tensor=t)) * case.weight_bytes
    return weights


def activation_bytes(case: ServingCase, candidates: ServingCandidates) -> FloatArray:
    """Return the bytes of one layer's working set for a pass with the maximum number of tokens.

    These are the residual, the normed input, the attention output, and the widest tensors of the
    MLP.
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


def _end_layer_bytes(case: ServingCase, t: IntArray) -> FloatArray:
    ends: FloatArray = WIDE_BYTES * case.model.vocab_size * case.model.hidden_size / t
    return ends
