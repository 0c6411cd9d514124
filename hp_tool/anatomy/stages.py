"""What each pipeline stage of one configuration holds and takes, costed as a section of the pipeline by the same formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hp_tool.cost.candidates import DUALPIPE, ZBV, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.pipeline_parts import STAGE_PARTS, rank_contents, stage_seconds, stages_by_kind
from hp_tool.cost.pipeline_stages import NO_LAYERS, Pipeline, pipeline_part, stage_contents, whole_pipeline
from hp_tool.cost.step_time import micro_batches
from hp_tool.cost.training import training_costs
from hp_tool.domain.frameworks import facts
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.training.problem import TrainingProblem

_Contents = tuple[float, float, tuple[bool, bool], TrainingCase]
"""Layers before, layers, whether embedding and output layer stand there, and the case on the stage's device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnatomy:
    """One rank of the pipeline, 0-based; of its tensor, context and data-parallel ranks all are alike."""

    rank: int
    gpu: str
    layers: float
    """Transformer layers, of all its model chunks."""
    holds_embedding: bool
    holds_output: bool
    memory_bytes: dict[str, float]
    """By cost.memory.MEMORY_PARTS."""
    capacity_bytes: float
    seconds: float
    """One micro-batch through all its chunks, there and back, with exposed communication and waits for the host."""
    parts_s: dict[str, float]
    """What of them is compute, recompute, and communication of each kind."""

    @property
    def total_bytes(self) -> float:
        return sum(self.memory_bytes.values())


def stages(*, problem: TrainingProblem, config: ParallelConfig) -> tuple[StageAnatomy, ...]:
    """Every stage of a legal configuration, first to last.

    Rows of unequal cost (packed sequences) are taken at their mean; what the slowest of them adds is in the estimate's time.
    """
    candidate = Candidates.alone(config)
    parts = _parts(problem, candidate)
    return tuple(_anatomy(rank, part, case, candidate, problem) for rank, (part, case) in enumerate(parts))


def _parts(problem: TrainingProblem, candidate: Candidates) -> Iterator[tuple[Pipeline, TrainingCase]]:
    """Each stage as a part of the pipeline of its own, and the case on its device."""
    p, layout, model = int(candidate.pipeline_parallel_size), problem.strategy.pipeline_layout, problem.model
    if layout is not None:
        for rank in range(p):
            yield rank_contents(layout, rank=rank, stages=p, model=model).pipeline(model), problem
    elif p == 1 and not problem.cluster.kinds:
        yield whole_pipeline(problem, candidate), problem
    else:
        contents = _of_two_kinds(problem, candidate, p) if problem.cluster.kinds else _contents(problem, candidate, p)
        for rank, (before, count, (embedding, output), case) in enumerate(contents):
            part = pipeline_part(
                model,
                candidate,
                first_rank=rank,
                layers_before=before,
                stages=1,
                layers=count,
                embedding=embedding,
                output=output,
            )
            yield part, case


def _contents(problem: TrainingProblem, candidate: Candidates, p: int) -> Iterator[_Contents]:
    """What each rank of a pipeline that is not laid out by hand holds."""
    if facts(problem.workload.framework).balances_blocks:
        layers, output_at = stage_contents(problem.model, p)
        counts = [float(count) for count in layers]
        ends = [(rank == 0, rank == output_at) for rank in range(p)]
    else:
        pipeline = whole_pipeline(problem, candidate)
        each = float(pipeline.critical.count)
        counts = [each - float(pipeline.fewer_first), *[each] * (p - 2), each - float(pipeline.fewer_last)]
        ends = [(rank == 0, rank == p - 1) for rank in range(p)]
        if candidate.pipeline_schedule == ZBV:
            ends = [(rank == 0, rank == 0) for rank in range(p)]
        elif candidate.pipeline_schedule == DUALPIPE:
            ends = [(rank in (0, p - 1),) * 2 for rank in range(p)]
    for rank, count in enumerate(counts):
        yield sum(counts[:rank]), max(count, NO_LAYERS), ends[rank], problem


def _of_two_kinds(problem: TrainingProblem, candidate: Candidates, p: int) -> Iterator[_Contents]:
    """The same on two kinds of devices. Stages of a kind hold equally many layers, as `cost.pipeline_parts` found best."""
    layers = [float(count) for count in problem.costs(candidate).layers_by_kind]
    kinds = problem.kinds
    assert kinds  # there are two
    first = int(stages_by_kind(kinds, candidate)[0])
    for rank in range(p):
        kind = int(rank >= first)
        before = min(rank, first) * layers[0] + max(rank - first, 0) * layers[1]
        yield before, layers[kind], (rank == 0, rank == p - 1), kinds[kind]


def _anatomy(rank: int, part: Pipeline, case: TrainingCase, candidate: Candidates, problem: TrainingProblem) -> StageAnatomy:
    costs = training_costs(
        case=case,
        candidates=candidate,
        pipeline=part,
        memory_headroom_fraction=problem.constraints.memory_headroom_fraction,
    )
    m = micro_batches(candidate, workload=problem.workload)
    whole, stage = part.part is None, part.stages[0]
    return StageAnatomy(
        rank=rank,
        gpu=case.cluster.gpu.name,
        layers=float(problem.model.total_layers) if whole else round(float(stage.layers.count - stage.extra_layers), 6),
        holds_embedding=whole or bool(part.embedding),
        holds_output=whole or bool(part.output),
        memory_bytes={name: float(size) for name, size in costs.memory_parts.items()},
        capacity_bytes=float(costs.capacity_bytes),
        seconds=float(stage_seconds(costs, profile=case.profile, micro_batches=m)),
        parts_s={name: float(costs.parts[name] / m) for name in STAGE_PARTS},
    )
