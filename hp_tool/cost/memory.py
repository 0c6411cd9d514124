"""Bytes on the pipeline's first and last stage; the worse one counts.

With equal numbers of layers a middle stage holds fewer micro-batches than the first and neither embedding nor logits,
so only the ends can be the worst.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.cost.candidates import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Candidates, FloatArray, IntArray
from hp_tool.cost.layer import LayerBytes
from hp_tool.cost.pipeline import chunks_in_flight
from hp_tool.cost.shapes import activation_element_bytes
from hp_tool.cost.stages import FIRST, LAST, StageLayers
from hp_tool.cost.states import StateCosts, bytes_per_parameter
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
"""They sum to the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the worst stage of each candidate, shape (n,)."""

    parts: dict[str, FloatArray]
    """By MEMORY_PARTS."""
    layer_activations: FloatArray
    """The transformer layers' share of `activations`."""
    worst_stage: IntArray
    total: FloatArray


def memory(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    layer: LayerBytes,
    stages: StageLayers,
    states: StateCosts,
    micro_batches: FloatArray,
) -> Memory:
    """All parts on both ends, and the worse end picked; inner arrays have shape (2, n)."""
    c, e = candidates, activation_element_bytes(workload)
    t, p, v = c.tensor_parallel_size, c.pipeline_parallel_size, c.virtual_pipeline_parallel_size
    alone = p == 1
    is_first, is_last = alone | FIRST, alone | LAST
    hidden = workload.sequence_length * c.micro_batch_size / c.context_parallel_size * model.hidden_size
    sharded = hidden / np.where(c.sequence_parallel > 0, t, 1)

    in_flight = chunks_in_flight(c, from_end=(p - 1) * FIRST, micro_batches=micro_batches)
    layers = in_flight * chunk_activations(candidates=c, layer=layer, layers=stages.total / v)
    # Besides the layers: on the last stage the inputs of the final norm and of the output layer; on the first the
    # embedding's dropout mask, one byte an element, for each of up to p micro-batches under way.
    activations = layers + is_last * (2.0 * e * sharded)
    if workload.dropout > 0.0:
        activations = activations + is_first * (sharded * np.minimum(p, micro_batches))
    # Logits in 16 bits and the loss's fp32 copy, on which even the fused loss works.
    per_logit = e + 4.0
    logits = is_last * (per_logit * (1 + model.num_nextn_predict_layers) * model.vocab_size / model.hidden_size * hidden / t)
    # The loss's memory is free again when the backward pass reaches the layers.
    working = layer.backward_working + recomputed_working(candidates=c, layer=layer)
    if int(c.zero_stage.max()) >= 3:
        # Weights of two layers are gathered at a time: the running one and the prefetched next.
        sent = bytes_per_parameter(workload).communicated_weights / bytes_per_parameter(workload).weights
        whole = states.weights * sent * (c.data_parallel_size * c.context_parallel_size)
        working = working + (c.zero_stage >= 3) * whole * np.minimum(2.0 / stages.total, 1.0)
    buffers = np.maximum(working - logits, 0.0)

    allocated = states.weights + states.gradients + states.optimizer + activations + logits + buffers
    later = allocated[1] > allocated[0]
    ends = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": activations,
        "logits": logits,
        "buffers": buffers,
    }
    parts = {name: np.where(later, size[1], size[0]) for name, size in ends.items()}
    worst = np.maximum(allocated[0], allocated[1])
    parts["overhead"] = profile.gpu.context_bytes + profile.framework.fragmentation_fraction * worst
    return Memory(
        parts=parts,
        layer_activations=np.where(later, layers[1], layers[0]),
        worst_stage=np.where(later, p - 1, 0),
        total=worst + parts["overhead"],
    )


def chunk_activations(*, candidates: Candidates, layer: LayerBytes, layers: FloatArray) -> FloatArray:
    """Bytes one model chunk of `layers` layers keeps for one micro-batch under the candidate's recomputation.

    full uniform: one layer input for every recompute_num_layers layers; full block: the first recompute_num_layers
    layers keep their input, the others everything.
    """
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    plain = layers * np.where(method == SELECTIVE, layer.saved_selective, layer.saved)
    if int(method.max()) < FULL_UNIFORM:
        return plain
    blocked = np.where(count > 0, np.minimum(count, layers), layers)
    block = blocked * layer.saved_full + (layers - blocked) * layer.saved
    uniform = np.ceil(layers / np.maximum(count, 1)) * layer.saved_full
    return np.where(method == FULL_BLOCK, block, np.where(method == FULL_UNIFORM, uniform, plain))


def recomputed_working(*, candidates: Candidates, layer: LayerBytes) -> FloatArray:
    """Bytes that recomputation brings back at a time: one attention core, or the layers of one checkpoint."""
    method = candidates.recompute_method
    core = np.where(method == SELECTIVE, layer.attention_core, 0.0)
    if int(method.max()) < FULL_UNIFORM:
        return core
    at_once = np.where(method == FULL_UNIFORM, np.maximum(candidates.recompute_num_layers, 1), method == FULL_BLOCK)
    return core + at_once * layer.saved


def recomputed_layer_fraction(candidates: Candidates, *, layers_per_chunk: FloatArray) -> FloatArray:
    """Share of layers whose whole forward pass is run again."""
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    if int(method.max()) < FULL_UNIFORM:
        return np.zeros(len(candidates))
    blocked = np.where(count > 0, np.minimum(count / layers_per_chunk, 1.0), 1.0)
    return np.where(method == FULL_BLOCK, blocked, method == FULL_UNIFORM)
