"""The second stage of a pipeline, where the first holds less: a layer fewer, or leading dense layers in place of experts.

It keeps one micro-batch fewer than the first, p - 1, but of more layers, or with more parameters: Llama 3.1 405B at TP 8 and
PP 16 needs 6 % more memory there. Stages behind it hold no more than it does.
"""

from __future__ import annotations

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.elementwise import anywhere, maximum, where
from hp_tool.cost.memory import Memory
from hp_tool.cost.schedules.costs import is_folded
from hp_tool.cost.section import Section, section
from hp_tool.cost.stages import StageLayers
from hp_tool.domain.frameworks import facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


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
