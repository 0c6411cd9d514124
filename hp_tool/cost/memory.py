"""Bytes on the pipeline's first and last stage; the worse one counts.

With equal layers a middle stage holds fewer micro-batches than the first and neither embedding nor logits, so only the ends
can be the worst; `middle` looks at the second stage where the first has less.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.block import Column
from hp_tool.cost.candidates import DUALPIPE, FULL_BLOCK, FULL_UNIFORM, SELECTIVE, ZBV, Candidates, FloatArray
from hp_tool.cost.elementwise import anywhere, ceil, maximum, minimum, where, zeros_like
from hp_tool.cost.layer import LayerBytes
from hp_tool.cost.loss import logit_bytes
from hp_tool.cost.offload import offload_activations
from hp_tool.cost.schedules.costs import chunks_in_flight, is_folded, splits_backward, waiting_in_flight
from hp_tool.cost.section import Section, Stage
from hp_tool.cost.shapes import activation_element_bytes
from hp_tool.cost.sharding import PREFETCHED_LAYERS
from hp_tool.cost.stages import StageLayers
from hp_tool.cost.states import StateCosts
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
    worst_stage: FloatArray
    first_stage: FloatArray
    """Allocated on the first stage, without `overhead`."""
    total: FloatArray
    host_bytes: Column
    """Most that one rank keeps in host memory."""
    offloaded: Column
    """Activations that one micro-batch on a stage sends to the host."""


def memory(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    layers: tuple[LayerBytes, LayerBytes],
    stages: StageLayers,
    states: StateCosts,
    micro_batches: FloatArray,
) -> Memory:
    """All parts on both ends, and the worse end picked. `layers` are the mean layers of the first and of the last stage."""
    c, e = candidates, activation_element_bytes(workload)
    t, p, v = c.tensor_parallel_size, c.pipeline_parallel_size, c.virtual_pipeline_parallel_size
    hidden = workload.sequence_length * c.micro_batch_size / c.context_parallel_size * model.hidden_size
    sharded = hidden / where(c.sequence_parallel > 0, t, 1)
    # The first stage keeps the embedding's dropout mask, one byte an element, for each of up to p micro-batches under way.
    mask = sharded * minimum(p, micro_batches) if workload.dropout > 0.0 else 0.0
    # The last stage keeps the inputs of the final norm and of the output layer (not where that is frozen), logits and
    # what the loss makes of them; once more for each multi-token prediction.
    inputs = (1.0 if workload.freezes_output_layer else 2.0) * e * sharded
    loss = logit_bytes(workload, e=e) * (1 + model.num_nextn_predict_layers) * model.vocab_size / model.hidden_size * hidden / t
    # ZeRO 3 gathers the weights of the running layer and of those prefetched.
    gathered = states.gathered_layer * minimum(1.0 + PREFETCHED_LAYERS, stages.pace)

    framework = profile.framework
    temporary = framework.temporaries_fraction or framework.workspace_bytes
    alone = p == 1
    # Where the pipeline is folded, both ends of the model are on the first rank; in DualPipe on the last one too.
    scheduled = anywhere(c.pipeline_schedule)
    output_first = alone | is_folded(c) if scheduled else alone
    embedding_last = alone | (c.pipeline_schedule == DUALPIPE) if scheduled else alone
    output_last = c.pipeline_schedule != ZBV if scheduled else True
    embedding_first, before, after = True, 0, 0
    if isinstance(c, Section):
        before, after = c.stages_before, p - c.stages_before - c.stages
        embedding_first, embedding_last = c.holds_embedding, (c.stages == 1) * c.holds_embedding
        output_first, output_last = (c.stages == 1) * c.holds_output, c.holds_output
    ends = []
    host: Column = states.host_bytes
    offloaded: Column = 0.0
    for layer, end, name, from_end, is_first, is_last in (
        (layers[0], stages.first, "first", p - 1 - before, embedding_first, output_first),
        (layers[1], stages.last, "last", after + stages.output_from_end, embedding_last, output_last),
    ):
        layers_per_chunk = c.chunk_layers if isinstance(c, Stage) else end.layers / v
        chunk = chunk_activations(candidates=c, layer=layer, layers=layers_per_chunk)
        saved = chunk * chunks_in_flight(c, from_end=from_end, micro_batches=micro_batches)
        logits = is_last * loss
        if scheduled and anywhere(splits_backward(c)):
            # What waits for its weight gradients: the layers' matmul inputs and output gradients, and the logits' gradient.
            waiting = waiting_in_flight(c, from_end=from_end)
            saved = saved + waiting * end.layers * layer.waiting
            logits = logits + is_last * waiting * e * model.vocab_size / model.hidden_size * hidden / t
        if workload.offload == "activations":
            per_layer = chunk * v / end.layers
            saved, away = offload_activations(saved, layer_bytes=per_layer, workload=workload)
            host, offloaded = maximum(host, away), workload.offload_fraction * per_layer * stages.pace
        working = layer.backward_working + recomputed_working(candidates=c, layer=layer, layers=end.layers / v)
        activations = saved + is_last * inputs + is_first * mask
        unsaved = framework.workspace_bytes + framework.temporaries_fraction * (activations + logits) if temporary else 0.0
        ends.append(
            {
                "weights": getattr(states, f"{name}_weights"),
                "gradients": getattr(states, f"{name}_gradients"),
                "optimizer": getattr(states, f"{name}_optimizer"),
                "activations": activations,
                "logits": logits,
                # The loss's memory is free again when the backward pass reaches the layers.
                "buffers": maximum(working - logits, 0.0) + gathered + unsaved,
                "layers": saved,
            }
        )
    first, last = ends
    allocated, allocated_last = (sum(end[name] for name in MEMORY_PARTS[:-1]) for end in ends)
    later = allocated_last > allocated
    parts = {name: where(later, last[name], first[name]) for name in first}
    worst = maximum(allocated, allocated_last)
    layer_activations = parts.pop("layers")
    parts["overhead"] = profile.gpu.context_bytes + framework.fragmentation_fraction * worst
    return Memory(
        parts=parts,
        layer_activations=layer_activations,
        worst_stage=where(later, p - 1 - after - stages.output_from_end, before),
        first_stage=allocated,
        total=worst + parts["overhead"],
        host_bytes=host,
        offloaded=offloaded,
    )


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


def recomputed_layer_fraction(candidates: Candidates, *, layers_per_chunk: FloatArray) -> FloatArray:
    """Share of layers whose whole forward pass is run again."""
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    if not anywhere(method >= FULL_UNIFORM):
        return zeros_like(method)
    blocked = where(count > 0, minimum(count / layers_per_chunk, 1.0), 1.0)
    return where(method == FULL_BLOCK, blocked, method == FULL_UNIFORM)
