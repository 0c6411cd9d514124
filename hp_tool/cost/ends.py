"""The two ranks on which memory may be worst: their place in the pipeline, their layers, and the model's ends they hold."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.candidates import DUALPIPE, ZBV, Candidates
from hp_tool.cost.elementwise import Column, anywhere
from hp_tool.cost.schedules.costs import is_folded
from hp_tool.cost.section import Section, Stage
from hp_tool.cost.stages import StageLayers


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEnd:
    """One end of each candidate's pipeline, or of its section; shape (n,) or the same for all."""

    rank: Column
    """0-based, in the whole pipeline."""
    layers: Column
    chunk_layers: Column
    """Layers of one model chunk whose activations it holds."""
    holds_embedding: Column
    """1 or 0."""
    holds_output: Column
    """1 or 0: output layer and loss."""


def pipeline_ends(candidates: Candidates, *, stages: StageLayers) -> tuple[PipelineEnd, PipelineEnd]:
    """The rank with the first stage and the one with the output layer. Without a pipeline they are one and the same; where
    it is folded, both ends of the model are on the first rank, in DualPipe on the last one too.
    """
    c, p = candidates, candidates.pipeline_parallel_size
    first, last = stages.first.layers, stages.last.layers
    chunks = c.virtual_pipeline_parallel_size
    chunk_first, chunk_last = (c.chunk_layers,) * 2 if isinstance(c, Stage) else (first / chunks, last / chunks)
    before: Column = 0
    behind: Column = stages.output_from_end
    embedding: tuple[Column, Column]
    output: tuple[Column, Column]
    if isinstance(c, Section):
        before, behind = c.stages_before, behind + (p - c.stages_before - c.stages)
        one_stage = c.stages == 1
        embedding = c.holds_embedding, one_stage * c.holds_embedding
        output = one_stage * c.holds_output, c.holds_output
    elif anywhere(c.pipeline_schedule):
        embedding = True, (p == 1) | (c.pipeline_schedule == DUALPIPE)
        output = (p == 1) | is_folded(c), c.pipeline_schedule != ZBV
    else:
        embedding, output = (True, p == 1), (p == 1, True)
    return (
        PipelineEnd(rank=before, layers=first, chunk_layers=chunk_first, holds_embedding=embedding[0], holds_output=output[0]),
        PipelineEnd(
            rank=p - 1 - behind, layers=last, chunk_layers=chunk_last, holds_embedding=embedding[1], holds_output=output[1]
        ),
    )
