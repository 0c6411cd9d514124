"""Bytes on the pipeline's first and last stage; the worse one counts.

With equal layers a middle stage holds fewer micro-batches than the first and neither embedding nor logits, so only the ends
can be the worst; `middle` looks at the second stage where the first has less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_tool.cost.arrays import Column, FloatArray, anywhere, maximum, minimum, where
from hp_tool.cost.block import LayerBytes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.embedding_and_head import HeadBytes, head_bytes, waiting_logit_bytes
from hp_tool.cost.model_states import StateCosts
from hp_tool.cost.optimizer import offload_activations
from hp_tool.cost.pipeline_stages import PipelineEnd, Section, StageLayers, pipeline_ends, section
from hp_tool.cost.recomputation import chunk_activations, recomputed_working
from hp_tool.cost.schedules.bubble import chunks_in_flight, is_folded, splits_backward, waiting_in_flight
from hp_tool.cost.zero import PREFETCHED_LAYERS
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency
from hp_tool.domain.frameworks import facts
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndMemory:
    """Bytes on one end, for all micro-batches under way."""

    parts: dict[str, Column]
    """By MEMORY_PARTS, without `overhead`."""
    layer_activations: Column
    on_host: Column
    offloaded: Column
    """Of one micro-batch."""


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
    # ZeRO 3 gathers the weights of the running layer and of those prefetched.
    gathered = states.gathered_layer * minimum(1.0 + PREFETCHED_LAYERS, stages.pace)
    asked: dict[str, Any] = {
        "model": model,
        "workload": workload,
        "framework": profile.framework,
        "candidates": candidates,
        "head": head_bytes(model=model, workload=workload, candidates=candidates, micro_batches=micro_batches),
        "gathered": gathered,
        "pace": stages.pace,
        "micro_batches": micro_batches,
    }
    first_end, last_end = pipeline_ends(candidates, stages=stages)
    first_states, last_states = states.ends
    first = _end_memory(first_end, layer=layers[0], states=first_states, **asked)
    last = _end_memory(last_end, layer=layers[1], states=last_states, **asked)
    allocated: Column = sum(first.parts.values())
    allocated_last: Column = sum(last.parts.values())
    later = allocated_last > allocated
    worst = maximum(allocated, allocated_last)
    overhead = profile.gpu.context_bytes + profile.framework.fragmentation_fraction * worst
    return Memory(
        parts={name: where(later, last.parts[name], size) for name, size in first.parts.items()} | {"overhead": overhead},
        layer_activations=where(later, last.layer_activations, first.layer_activations),
        worst_stage=where(later, last_end.rank, first_end.rank),
        first_stage=allocated,
        total=worst + overhead,
        host_bytes=maximum(maximum(states.host_bytes, first.on_host), last.on_host),
        offloaded=last.offloaded,
    )


def _end_memory(
    end: PipelineEnd,
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    framework: FrameworkEfficiency,
    candidates: Candidates,
    layer: LayerBytes,
    states: dict[str, Column],
    head: HeadBytes,
    gathered: Column,
    pace: Column,
    micro_batches: FloatArray,
) -> _EndMemory:
    """What states, micro-batches under way and a running layer take; `pace` is the layers of the stage that sets the pace."""
    c, chunks = candidates, candidates.virtual_pipeline_parallel_size
    from_end = c.pipeline_parallel_size - 1 - end.rank
    chunk = chunk_activations(candidates=c, layer=layer, layers=end.chunk_layers)
    saved = chunk * chunks_in_flight(c, from_end=from_end, micro_batches=micro_batches)
    logits = end.holds_output * head.logits
    if anywhere(splits_backward(c)):
        # What waits for its weight gradients: the layers' matmul inputs and output gradients, and the logits' gradient.
        waiting = waiting_in_flight(c, from_end=from_end)
        saved = saved + waiting * end.layers * layer.waiting
        logits = logits + end.holds_output * waiting_logit_bytes(model, workload, c, micro_batches=waiting)
    on_host: Column = 0.0
    offloaded: Column = 0.0
    if workload.offload == "activations":
        per_layer = chunk * chunks / end.layers
        saved, on_host = offload_activations(saved, layer_bytes=per_layer, workload=workload)
        offloaded = workload.offload_fraction * per_layer * pace
    activations = saved + end.holds_output * head.inputs + end.holds_embedding * head.dropout_mask
    working = layer.backward_working + recomputed_working(candidates=c, layer=layer, layers=end.layers / chunks)
    # The loss's memory is free again when the backward pass reaches the layers.
    buffers = maximum(working - logits, 0.0) + gathered
    if framework.temporaries_fraction or framework.workspace_bytes:
        buffers = buffers + (framework.workspace_bytes + framework.temporaries_fraction * (activations + logits))
    return _EndMemory(
        parts=states | {"activations": activations, "logits": logits, "buffers": buffers},
        layer_activations=saved,
        on_host=on_host,
        offloaded=offloaded,
    )


# The second stage of a pipeline, where the first holds less: a layer fewer, or leading dense layers in place of experts.
#
# It keeps one micro-batch fewer than the first, p - 1, but of more layers, or with more parameters: Llama 3.1 405B at TP 8 and
# PP 16 needs 6 % more memory there. Stages behind it hold no more than it does.


def middle_stages(
    model: ModelSpec, workload: TrainingWorkload, candidates: Candidates, *, stages: StageLayers
) -> Section | None:
    """The stages between the ends as a section, where their first may be the fullest of all; None where none may be.

    Not counted: pipelines that are split by weight (nanotron), and folded ones, whose first rank has both ends. A section's own
    stages are equal.
    """
    c = candidates
    if isinstance(c, Section) or facts(workload.framework).balances_blocks:
        return None
    lighter = stages.fewer_first > 0
    if model.num_experts:
        lighter = lighter | (stages.first.moe_fraction < stages.pace_moe_fraction)
    if not anywhere(lighter & (c.pipeline_parallel_size > 2) & ~is_folded(c)):
        return None
    return section(
        c,
        stages_before=1,
        layers_before=stages.pace - stages.fewer_first,
        stages=maximum(c.pipeline_parallel_size - 2, 1),
        layers=stages.pace,
        holds_embedding=0,
        holds_output=0,
    )


def fuller(ends: Memory, middle: Memory, *, candidates: Candidates) -> Memory:
    """The memory of the fullest stage, of both ends and of those between where there are some; the first stage's own stays."""
    between = (candidates.pipeline_parallel_size > 2) & ~is_folded(candidates)
    later = between & (middle.total > ends.total)
    return Memory(
        parts={name: where(later, middle.parts[name], size) for name, size in ends.parts.items()},
        layer_activations=where(later, middle.layer_activations, ends.layer_activations),
        worst_stage=where(later, middle.worst_stage, ends.worst_stage),
        first_stage=ends.first_stage,
        total=where(later, middle.total, ends.total),
        host_bytes=maximum(ends.host_bytes, where(between, middle.host_bytes, 0.0)),
        offloaded=ends.offloaded,
    )
