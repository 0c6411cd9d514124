"""What every pipeline stage of one configuration holds and takes: each stage costed by the formulas of the whole, as a section
of it. The fullest one's bytes are the estimate's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from hp_tool.cost.candidates import DUALPIPE, ZBV, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.mixed_gpus import STAGE_PARTS, stage_seconds
from hp_tool.cost.pipeline_layout import rank_contents
from hp_tool.cost.pipeline_stages import NO_LAYERS, Section, Stage, section, stage_contents, stage_layers
from hp_tool.cost.step_time import micro_batches
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.frameworks import facts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.training.problem import TrainingProblem


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
    return tuple(
        _anatomy(rank, piece, cluster, profile, problem)
        for rank, (piece, cluster, profile) in enumerate(_pieces(problem, candidate))
    )


_Piece = tuple[Candidates, ClusterSpec, EfficiencyProfile]


def _pieces(problem: TrainingProblem, candidate: Candidates) -> Iterator[_Piece]:
    """The section of each rank, and the machine it is on."""
    p = int(candidate.pipeline_parallel_size)
    machine = problem.cluster, problem.profile
    layout = problem.strategy.pipeline_layout
    if layout is not None:
        columns: dict[str, Any] = {f.name: getattr(candidate, f.name) for f in fields(Candidates)}
        for rank in range(p):
            said = rank_contents(layout, rank=rank, stages=p, model=problem.model)._asdict()
            del said["ranks"]
            yield Stage(**columns, **said, stages=1), *machine
        return
    if problem.cluster.kinds:
        yield from _of_two_kinds(problem, candidate, p)
        return
    if p == 1:
        yield candidate, *machine
        return
    for rank, (before, held, embedding, output) in enumerate(_contents(problem, candidate, p)):
        yield _section(candidate, rank, before=before, layers=held, embedding=embedding, output=output), *machine


def _contents(problem: TrainingProblem, candidate: Candidates, p: int) -> Iterator[tuple[float, float, bool, bool]]:
    """(layers before, layers, embedding, output layer) of each rank of a pipeline that is not laid out by hand."""
    model = problem.model
    if facts(problem.workload.framework).balances_blocks:
        found, output_at = stage_contents(model, p)
        counts = [float(count) for count in found]
        ends = [(rank == 0, rank == output_at) for rank in range(p)]
    else:
        split = stage_layers(model, candidate, framework=problem.workload.framework)
        each = float(split.pace)
        counts = [each - float(split.fewer_first), *[each] * (p - 2), each - float(split.fewer_last)]
        ends = [(rank == 0, rank == p - 1) for rank in range(p)]
        if candidate.pipeline_schedule == ZBV:
            ends = [(rank == 0, rank == 0) for rank in range(p)]
        elif candidate.pipeline_schedule == DUALPIPE:
            ends = [(rank in (0, p - 1),) * 2 for rank in range(p)]
    for rank, held in enumerate(counts):
        yield sum(counts[:rank]), max(held, NO_LAYERS), *ends[rank]


def _of_two_kinds(problem: TrainingProblem, candidate: Candidates, p: int) -> Iterator[_Piece]:
    """Stages of a kind hold equally many layers, as `cost.mixed` found best."""
    per_stage = [float(count) for count in problem.costs(candidate).layers_by_kind]
    first = p * problem.cluster.kinds[0].num_gpus // sum(kind.num_gpus for kind in problem.cluster.kinds)
    for rank in range(p):
        kind = int(rank >= first)
        before = min(rank, first) * per_stage[0] + max(rank - first, 0) * per_stage[1]
        here = _section(candidate, rank, before=before, layers=per_stage[kind], embedding=rank == 0, output=rank == p - 1)
        yield here, problem.kinds[kind].cluster, problem.kinds[kind].profile


def _section(c: Candidates, rank: int, *, before: float, layers: float, embedding: bool, output: bool) -> Section:
    return section(
        c, stages_before=rank, layers_before=before, stages=1, layers=layers, holds_embedding=embedding, holds_output=output
    )


def _anatomy(
    rank: int, piece: Candidates, cluster: ClusterSpec, profile: EfficiencyProfile, problem: TrainingProblem
) -> StageAnatomy:
    costs: TrainingCosts = training_costs(
        case=TrainingCase(
            model=problem.model, cluster=cluster, workload=problem.workload, profile=profile, strategy=problem.strategy
        ),
        candidates=piece,
        memory_headroom_fraction=problem.constraints.memory_headroom_fraction,
    )
    m = micro_batches(piece, workload=problem.workload)
    here = piece if isinstance(piece, Section) else None  # None: the whole pipeline is one stage
    return StageAnatomy(
        rank=rank,
        gpu=cluster.gpu.name,
        layers=float(problem.model.total_layers) if here is None else round(float(here.layers), 6),
        holds_embedding=here is None or bool(here.holds_embedding),
        holds_output=here is None or bool(here.holds_output),
        memory_bytes={name: float(size) for name, size in costs.memory_parts.items()},
        capacity_bytes=float(costs.capacity_bytes),
        seconds=float(stage_seconds(costs, profile=profile, micro_batches=m)),
        parts_s={name: float(costs.parts[name] / m) for name in STAGE_PARTS},
    )
