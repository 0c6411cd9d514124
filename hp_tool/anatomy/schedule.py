"""The pipeline schedule of one configuration in time, as its ranks would run it: what a drawing of it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hp_tool.anatomy.stages import StageAnatomy
from hp_tool.cost.block import LayerTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.pipeline_stages import whole_pipeline
from hp_tool.cost.schedules import execution
from hp_tool.cost.schedules.execution import Operation, Span
from hp_tool.cost.step_time import micro_batches, transfer_seconds
from hp_tool.cost.training import model_layers
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.training.problem import TrainingProblem

MAX_RANKS = 16
"""Drawn; of more, these are chosen evenly, both ends among them."""
MAX_STAGES = 128
"""Of a longer pipeline the schedule is not executed."""
SpanKind = Literal["F", "B", "W", "BW", "F+B"]
"""Forward; backward for the inputs; for the weights; both at once; a forward and a backward pass that overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpan:
    """One block of work; seconds from the start of the step."""

    kind: SpanKind
    micro_batch: int
    """0-based; of a pair that overlaps, that of the forward pass."""
    chunk: int
    """0-based, of the rank's model chunks."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """One pipeline rank."""

    rank: int
    spans: tuple[ScheduleSpan, ...]
    idle_fraction: float
    """Share of the drawn time in which it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The executed schedule. Data-parallel communication and the optimizer, which follow it, are not in it, nor is exposed
    stage-to-stage communication besides the way there and back.
    """

    name: str
    num_ranks: int
    """Of which `rows` may be a choice."""
    num_micro_batches: int
    """Of a step on each replica."""
    drawn_micro_batches: int
    """Fewer where the ones left out would only lengthen the steady middle."""
    end_s: float
    """Of the drawn ones."""
    rows: tuple[ScheduleRow, ...]


def schedule(*, problem: TrainingProblem, config: ParallelConfig, each: Sequence[StageAnatomy]) -> Schedule | None:
    """The schedule of a legal configuration with stages `each`; None without a pipeline, or with more than MAX_STAGES."""
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    if not 1 < p <= MAX_STAGES:
        return None
    candidate = Candidates.alone(config)
    all_micro_batches = micro_batches(candidate, workload=problem.workload)
    m = int(all_micro_batches)
    name = config.pipeline_schedule or ("interleaved" if v > 1 else "1f1b")
    enough = {"interleaved": 2 * p, "zbv": 2 * p + 2, "dualpipe": 2 * p + 4}  # to show how it fills, runs and drains
    drawn = min(m, enough.get(name, p + 4))
    layer = model_layers(
        case=problem,
        candidates=candidate,
        pipeline=whole_pipeline(problem, candidate),
        micro_batches=all_micro_batches,
    ).time
    work = [_passes(stage, layer) for stage in each]
    if name == "interleaved":
        orders = execution.interleaved(p=p, v=v, m=drawn)
    else:
        of_stages = {"gpipe": execution.gpipe, "zb-h1": execution.zb_h1, "zbv": execution.zbv, "dualpipe": execution.dualpipe}
        orders = of_stages.get(name, execution.one_f_one_b)(p=p, m=drawn)
    transfer_s = float(transfer_seconds(case=problem, candidates=candidate))
    spans = execution.timeline(orders=orders, seconds=_seconds(name, work, p=p, v=v), transfer_s=transfer_s)
    end_s = max(row[-1].end_s for row in spans)
    ranks = range(p) if p <= MAX_RANKS else [round(k * (p - 1) / (MAX_RANKS - 1)) for k in range(MAX_RANKS)]
    return Schedule(
        name=name,
        num_ranks=p,
        num_micro_batches=m,
        drawn_micro_batches=drawn,
        end_s=end_s,
        rows=tuple(_row(rank, spans[rank], name=name, p=p, end_s=end_s) for rank in ranks),
    )


def _passes(stage: StageAnatomy, layer: LayerTime) -> dict[str, float]:
    """Seconds of one micro-batch on one rank by kind of operation, all its model chunks together.

    The stage's seconds, with the ends (embedding, output layer) and waits for the host, are divided like those of `layer`, the
    mean one of the critical stage. Recomputation is backward.
    """
    forward = weight = 0.0
    for name, ahead, back in (
        ("compute", layer.forward, layer.backward),
        ("tensor_parallel", layer.tensor, layer.tensor_backward),
        ("context_parallel", layer.context, layer.context_backward),
        ("expert_parallel", layer.expert, layer.expert_backward),
    ):
        both = float(ahead + back)
        if both:
            forward += stage.parts_s[name] * float(ahead) / both
    if layer.forward + layer.backward:
        weight = stage.parts_s["compute"] * float(layer.weight_gradient) / float(layer.forward + layer.backward)
    busy = sum(stage.parts_s.values())
    stretch = stage.seconds / busy if busy else 1.0
    forward_s, backward_s, weight_s = stretch * forward, stretch * (busy - forward - weight), stretch * weight
    return {"F": forward_s, "B": backward_s, "W": weight_s, "BW": backward_s + weight_s}


def _seconds(name: str, work: Sequence[dict[str, float]], *, p: int, v: int) -> Callable[[Operation], float]:
    """What one operation takes: a model chunk's share of its rank's time; of DualPipe's two ranks, the first's."""

    def seconds(operation: Operation) -> float:
        stage = operation.stage
        rank = min(stage, 2 * p - 1 - stage) if name == "zbv" else stage % p
        return work[rank][operation.kind] / v

    return seconds


def _row(rank: int, spans: Sequence[Span], *, name: str, p: int, end_s: float) -> ScheduleRow:
    drawn = []
    for span in spans:
        first = span.block[0]
        kind: SpanKind = first.kind if len(span.block) == 1 else "F+B"
        chunk = int(first.stage >= p) if name == "zbv" else first.stage // p
        drawn.append(
            ScheduleSpan(kind=kind, micro_batch=first.micro_batch, chunk=chunk, start_s=span.start_s, end_s=span.end_s)
        )
    busy = sum(span.end_s - span.start_s for span in spans)
    return ScheduleRow(rank=rank, spans=tuple(drawn), idle_fraction=1.0 - busy / end_s)
