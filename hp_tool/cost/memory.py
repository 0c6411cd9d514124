"""Bytes on each pipeline stage; the worst one counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.cost.candidates import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Candidates, FloatArray, IntArray
from hp_tool.cost.layer import LayerBytes, activation_element_bytes
from hp_tool.cost.parameters import embedding_parameters, layer_parameters, norm_weights, output_parameters
from hp_tool.cost.pipeline import chunks_in_flight
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import StatePrecision, TrainingWorkload

STATE_BYTES: dict[StatePrecision, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
"""They sum to the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes one parameter takes before sharding: 2 + 4 + 12 = 18 by default."""

    weights: float
    gradients: float
    optimizer: float
    """Two Adam states and the master copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes by part (each (n,)) on one stage of each candidate."""

    parts: dict[str, FloatArray]
    layer_activations: FloatArray
    parameters: FloatArray

    @property
    def total(self) -> FloatArray:
        return sum((self.parts[name] for name in MEMORY_PARTS[1:]), self.parts["weights"])


def state_bytes(workload: TrainingWorkload) -> StateBytes:
    """Mixed precision as Megatron Core keeps it: 16-bit weights, fp32 gradients, fp32 master copy and Adam states."""
    weights = STATE_BYTES[workload.parameter_precision or ("fp32" if workload.precision == "fp32" else "bf16")]
    gradients = STATE_BYTES[workload.gradient_precision or "fp32"]
    states = {"adam": 2.0, "muon": 1.0, "sgd": 0.0}[workload.optimizer] * STATE_BYTES[workload.optimizer_precision or "fp32"]
    master = 4.0 if weights < 4.0 else 0.0
    return StateBytes(weights=weights, gradients=gradients, optimizer=states + master)


def stage_parameters(model: ModelSpec, workload: TrainingWorkload, candidates: Candidates, *, stage: IntArray) -> FloatArray:
    """Parameters on one rank of a stage. First and last stage carry embedding and output layer; tied weights are kept
    on both where those are different stages (Megatron Core), once where they are the same.
    """
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    first, last = stage == 0, stage == p - 1
    embedding = embedding_parameters(model, sequence_length=workload.sequence_length, tensor_parallel_size=t)
    output = output_parameters(model, tensor_parallel_size=t)
    own_output = last & ((p > 1) | (not model.tie_word_embeddings))
    layers = model.num_hidden_layers / p * layer_parameters(model, tensor_parallel_size=t)
    return layers + first * embedding + own_output * output + last * norm_weights(model)


def stage_memory(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    layer: LayerBytes,
    stage: IntArray,
    micro_batches: FloatArray,
) -> StageMemory:
    """Bytes on `stage` (0-based, one per candidate)."""
    c, e = candidates, activation_element_bytes(workload)
    t, p, v = (
        a.astype(np.float64) for a in (c.tensor_parallel_size, c.pipeline_parallel_size, c.virtual_pipeline_parallel_size)
    )
    d = (c.data_parallel_size * c.context_parallel_size).astype(np.float64)
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    shards = np.where(c.sequence_parallel > 0, t, 1.0)
    parameters = stage_parameters(model, workload, c, stage=stage)

    state = state_bytes(workload)
    weights = parameters * state.weights / np.where(c.zero_stage >= 3, d, 1.0)
    gradients = parameters * state.gradients / np.where(c.zero_stage >= 2, d, 1.0)
    optimizer = parameters * state.optimizer / np.where(c.zero_stage >= 1, d, 1.0)

    in_flight = chunks_in_flight(c, stage=stage, micro_batches=micro_batches)
    layer_activations = in_flight * chunk_activations(candidates=c, layer=layer, layers=model.num_hidden_layers / (p * v))
    # Besides the layers: the embedding's dropout mask for every micro-batch in flight (p of them, v of whose chunks are
    # others'), and on the last stage the inputs of the final norm and of the output layer.
    first, last = stage == 0, stage == c.pipeline_parallel_size - 1
    embedding_mask = (
        first * (1.0 if workload.dropout > 0.0 else 0.0) * tokens * model.hidden_size / shards * np.minimum(p, micro_batches)
    )
    head_inputs = last * 2.0 * e * tokens * model.hidden_size / shards
    # Logits in 16 bits and the loss's fp32 copy; a fused loss keeps no copy.
    per_logit = e if workload.cross_entropy == "fused" else e + 4.0
    logits = last * per_logit * tokens * model.vocab_size / t

    recomputed = np.where(c.recompute_method == SELECTIVE, layer.attention_core, 0.0)
    uniform = c.recompute_method == FULL_UNIFORM
    recomputed = (
        recomputed + np.where(uniform, np.maximum(c.recompute_num_layers, 1.0), c.recompute_method == FULL_BLOCK) * layer.saved
    )
    # The loss's memory is free again when the first layer's backward pass starts.
    buffers = np.maximum(layer.backward_working + recomputed - logits, 0.0)

    allocated = weights + gradients + optimizer + layer_activations + embedding_mask + head_inputs + logits + buffers
    overhead = profile.framework.memory_overhead_bytes + profile.framework.fragmentation_fraction * allocated
    return StageMemory(
        parts={
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": layer_activations + embedding_mask + head_inputs,
            "logits": logits,
            "buffers": buffers,
            "overhead": overhead,
        },
        layer_activations=layer_activations,
        parameters=parameters,
    )


def chunk_activations(*, candidates: Candidates, layer: LayerBytes, layers: FloatArray) -> FloatArray:
    """Bytes one model chunk of `layers` layers keeps for one micro-batch under the candidate's recomputation.

    full uniform: one layer input for every recompute_num_layers layers; full block: the first recompute_num_layers
    layers keep their input, the others everything.
    """
    c = candidates
    blocked = np.where(c.recompute_num_layers > 0, np.minimum(c.recompute_num_layers, layers), layers)
    uniform = np.ceil(layers / np.maximum(c.recompute_num_layers, 1)) * layer.saved_full
    block = blocked * layer.saved_full + (layers - blocked) * layer.saved
    plain = layers * np.where(c.recompute_method == SELECTIVE, layer.saved_selective, layer.saved)
    full = np.where(c.recompute_method == FULL_BLOCK, block, uniform)
    return np.where(c.recompute_method >= FULL_UNIFORM, full, plain)


def recomputed_layer_fraction(candidates: Candidates, *, layers_per_chunk: FloatArray) -> FloatArray:
    """Share of layers whose whole forward pass is run again."""
    c = candidates
    blocked = np.where(c.recompute_num_layers > 0, np.minimum(c.recompute_num_layers / layers_per_chunk, 1.0), 1.0)
    return np.where(c.recompute_method == FULL_BLOCK, blocked, np.where(c.recompute_method == FULL_UNIFORM, 1.0, 0.0))
