"""Pipelines whose stages a query lays out: stages that hold the same are costed once, each as a section of one stage.

Memory is the worst stage's. Step time: the slowest stage runs m micro-batches; the bubble is what all other stages take for
one, over v, as with equal stages. Not counted: that interleaving also waits where chunks of neighbouring ranks differ while the
ranks' sums do not; the lookup in multi-token prediction's copy of the embedding, and that copy's share in the gradients of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from hp_tool.cost.arrays import Floats, Ints, maximum, result, results
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.mixed_gpus import PACED_PARTS, chosen, stage_seconds
from hp_tool.cost.pipeline_stages import Stage
from hp_tool.cost.step_time import TIME_PARTS, micro_batches, step_seconds
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_layout import LayoutChunk, PipelineLayout


class StageKind(NamedTuple):
    """Stages that hold the same; of Stage's fields those that a layout decides."""

    ranks: float
    """How many there are."""
    stages_before: float
    """The first of them, which holds most micro-batches."""
    layers_before: float
    layers: float
    dense_layers: float
    extra_layers: float
    holds_embedding: float
    embeddings: float
    holds_output: float
    chunk_layers: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOutPipeline:
    """What does not change from candidate to candidate."""

    case: TrainingCase
    layout: PipelineLayout
    memory_headroom_fraction: float

    def costs(self, candidates: Candidates) -> TrainingCosts:
        """Of candidates with as many chunks as the layout."""
        rows = candidates.take(slice(None)) if len(candidates.shape) > 1 else candidates
        columns = {f.name: getattr(rows, f.name) for f in fields(Candidates)}
        kinds = self._kinds(rows.pipeline_parallel_size)
        each = []
        for kind in kinds:
            said = kind._asdict()
            del said["ranks"]
            here: Candidates = Stage(**columns, **said, stages=1)
            each.append(training_costs(case=self.case, candidates=here, memory_headroom_fraction=self.memory_headroom_fraction))
        return self._together(rows, each, [kind.ranks for kind in kinds])

    def _kinds(self, stages: Ints) -> list[StageKind]:
        """The kinds for each candidate's number of stages, every field an array where `stages` is one. Where a candidate has
        fewer kinds than another, its last one stands in for 0 ranks.
        """
        if not isinstance(stages, np.ndarray):
            return stage_kinds(self.layout, stages=int(stages), model=self.case.model)
        if not stages.size:
            return stage_kinds(self.layout, stages=len(self.layout.chunks), model=self.case.model)
        sizes, size_of = np.unique(stages, return_inverse=True)
        tables = [stage_kinds(self.layout, stages=int(p), model=self.case.model) for p in sizes]
        most = max(len(table) for table in tables)
        padded = [table + [table[-1]._replace(ranks=0.0)] * (most - len(table)) for table in tables]
        return [StageKind(*np.array([table[k] for table in padded])[size_of].T) for k in range(most)]

    def _together(self, rows: Candidates, each: Sequence[TrainingCosts], counts: Sequence[Floats]) -> TrainingCosts:
        m, v = micro_batches(rows, workload=self.case.workload), rows.virtual_pipeline_parallel_size
        seconds = [stage_seconds(one, profile=self.case.profile, micro_batches=m) for one in each]
        fullest, slowest, slowest_s, all_s = each[0], each[0], seconds[0], counts[0] * seconds[0]
        largest: dict[str, Floats] = {name: each[0].parts[name] for name in TIME_PARTS}
        for one, count, stage_s in zip(each[1:], counts[1:], seconds[1:], strict=True):
            fullest = chosen(one.memory_total_bytes > fullest.memory_total_bytes, one, fullest)
            slowest = chosen(stage_s > slowest_s, one, slowest)
            slowest_s, all_s = maximum(stage_s, slowest_s), all_s + count * stage_s
            largest = {name: maximum(one.parts[name], so_far) for name, so_far in largest.items()}
        parts: dict[str, Floats] = largest | {name: slowest.parts[name] for name in PACED_PARTS}
        # A stage's own bubble holds what it takes itself; the rest are transfers, which all have alike.
        parts["pipeline_bubble"] = each[0].parts["pipeline_bubble"] + (all_s - slowest_s - seconds[0]) / v
        return replace(
            fullest,
            parts=results(parts),
            step_s=result(step_seconds(parts)),
            first_stage_bytes=each[0].first_stage_bytes,
        )


def stage_kinds(layout: PipelineLayout, *, stages: int, model: ModelSpec) -> list[StageKind]:
    """What the ranks of a pipeline of so many stages hold, in the order of the first rank of each kind."""
    kinds: dict[tuple[Any, ...], StageKind] = {}
    for rank in range(stages):
        held, dense = _held(layout, model, rank, stages)
        contents = (dense, *((chunk.embedding, chunk.layers, chunk.mtp_layers, chunk.loss) for chunk in held))
        found = kinds.get(contents)
        kinds[contents] = found._replace(ranks=found.ranks + 1) if found else _kind(model, held, dense, rank, stages)
    return list(kinds.values())


def rank_contents(layout: PipelineLayout, *, rank: int, stages: int, model: ModelSpec) -> StageKind:
    """What one rank of a pipeline of so many holds."""
    held, dense = _held(layout, model, rank, stages)
    return _kind(model, held, dense, rank, stages)


def _held(layout: PipelineLayout, model: ModelSpec, rank: int, stages: int) -> tuple[tuple[LayoutChunk, ...], int]:
    """A rank's chunks, and how many of their layers are dense ones at the start of a mixture of experts."""
    leading = model.num_hidden_layers - model.moe_layers if model.num_experts else 0
    held = layout.stage(rank, stages=stages)
    return held, sum(min(max(leading - chunk.layers_before, 0), chunk.layers) for chunk in held)


def _kind(model: ModelSpec, held: tuple[LayoutChunk, ...], dense: int, rank: int, stages: int) -> StageKind:
    embedding, output, extra = (sum(getattr(chunk, name) for chunk in held) for name in ("embedding", "loss", "mtp_layers"))
    # Where weights are tied, the output layer's are the copy.
    copied = extra > 0 and not (model.tie_word_embeddings and output)
    return StageKind(
        ranks=1.0,
        stages_before=rank,
        layers_before=held[0].layers_before,
        layers=sum(chunk.layers for chunk in held),
        dense_layers=dense,
        extra_layers=extra,
        holds_embedding=embedding,
        embeddings=max(embedding, copied),
        holds_output=output,
        chunk_layers=_layers_in_flight([chunk.layers + chunk.mtp_layers for chunk in held], rank, stages),
    )


def _layers_in_flight(layers: list[int], rank: int, stages: int) -> float:
    """Mean layers of the chunks that `schedules.costs.chunks_in_flight` counts: p micro-batches are through each chunk but the
    last when the first of the last one's backward passes begins, 2(p - r - 1) + 1 more follow, beyond p in the first chunk.
    """
    more = 2 * (stages - rank - 1) + 1
    passes = [stages] * (len(layers) - 1) + [min(more, stages)]
    passes[0] += max(more - stages, 0)
    if len(layers) == 1:
        return float(layers[0])
    return sum(count * held for count, held in zip(passes, layers, strict=True)) / sum(passes)
