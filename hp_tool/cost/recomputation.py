"""Recomputation: what a model chunk keeps all the same, what comes back at a time, and what runs again.

The modules that selective recomputation may name are in `modules`, torchtitan's operations in `per_op`.
"""

from __future__ import annotations

from hp_tool.cost.block import LayerBytes, LayerTime
from hp_tool.cost.candidates import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Candidates
from hp_tool.cost.elementwise import Column, FloatArray, anywhere, ceil, maximum, minimum, where, zeros_like
from hp_tool.cost.schedules.costs import splits_backward


def chunk_activations(*, candidates: Candidates, layer: LayerBytes, layers: Column) -> Column:
    """Bytes one model chunk of `layers` layers keeps for one micro-batch under the candidate's recomputation.

    full uniform: one layer input for every recompute_num_layers layers; full block: the first recompute_num_layers
    layers keep their input, the others everything.
    """
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    plain = layers * where(method == SELECTIVE, layer.saved_selective, layer.saved)
    if not anywhere(method >= FULL_UNIFORM):
        return plain
    blocked = where(count > 0, minimum(count, layers), layers)
    block = blocked * layer.saved_full + (layers - blocked) * layer.saved
    uniform = ceil(layers / maximum(count, 1)) * layer.saved_full
    return where(method == FULL_BLOCK, block, where(method == FULL_UNIFORM, uniform, plain))


def recomputed_working(*, candidates: Candidates, layer: LayerBytes, layers: Column) -> Column:
    """Bytes that recomputation brings back at a time: one attention core, or the modules of one block, or the layers of one
    checkpoint; where weight gradients come after the input gradients of the chunk, all its `layers`.
    """
    method = candidates.recompute_method
    core = where(method == SELECTIVE, layer.repeated, 0.0)
    if not anywhere(method >= FULL_UNIFORM):
        return core
    at_once = where(method == FULL_UNIFORM, maximum(candidates.recompute_num_layers, 1), method == FULL_BLOCK)
    split = splits_backward(candidates)
    if anywhere(split):
        at_once = where(split & (method >= FULL_UNIFORM), layers, at_once)
    return core + at_once * layer.saved


def recomputed_layer_fraction(candidates: Candidates, *, layers_per_chunk: Column) -> FloatArray:
    """Share of layers whose whole forward pass is run again."""
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    if not anywhere(method >= FULL_UNIFORM):
        return zeros_like(method)
    blocked = where(count > 0, minimum(count / layers_per_chunk, 1.0), 1.0)
    return where(method == FULL_BLOCK, blocked, method == FULL_UNIFORM)


def recomputed_seconds(candidates: Candidates, *, layer: LayerTime, forward: Column, whole: Column) -> Column:
    """Seconds per layer and micro-batch that run again, the mean of a stage's layers: of the share `whole` of them
    (`recomputed_layer_fraction`) the forward pass, which takes `forward` with its communication; selectively, `repeated`.
    """
    return whole * forward + where(candidates.recompute_method == SELECTIVE, layer.repeated, 0.0)
