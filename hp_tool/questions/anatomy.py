"""Details of one configuration: memory and time of each pipeline stage, the pipeline schedule, and
the placement of ranks on devices.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from hp_tool.cost.block import LayerTime
from hp_tool.cost.candidates import DUALPIPE, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.filled_stages import stage_contents as filled_contents
from hp_tool.cost.network import dense_group, expert_group
from hp_tool.cost.pipeline_parts import rank_contents, stage_seconds, stages_by_kind
from hp_tool.cost.pipeline_stages import NO_LAYERS, Pipeline, pipeline_part
from hp_tool.cost.schedules import execution
from hp_tool.cost.schedules.execution import Operation, Span
from hp_tool.cost.stage_contents import stage_contents
from hp_tool.cost.step_time import micro_batches, transfer_seconds
from hp_tool.cost.training import stages_and_layers, training_costs
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.parts import PARTS, PER_MICRO_BATCH
from hp_tool.domain.pipeline_layout import chunk_layers
from hp_tool.domain.result import Estimate
from hp_tool.errors import HpToolError
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem

_Contents = tuple[float, float, tuple[float, ...] | None, tuple[bool, bool], TrainingCase]
"""Contents of a pipeline stage: number of layers before it; number of its layers; number of its
layers of each kind (None: derived from the layers before it); whether it has the embedding, and
whether it has the output layer; the case on its device.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnatomy:
    """Memory and time of one pipeline rank, numbered from 0. They are the same on all its tensor-,
    context- and data-parallel ranks.
    """

    rank: int
    gpu: str
    layers: float
    """Number of transformer layers in all model chunks of the rank."""
    holds_embedding: bool
    holds_output: bool
    memory_bytes: dict[str, float]
    """Bytes by part; keys are `domain.parts.MEMORY_KEYS`."""
    capacity_bytes: float
    seconds: float
    """Seconds of one micro-batch in all model chunks of the rank, forward and backward.

    Includes exposed communication and waiting for the host.
    """
    parts_s: dict[str, float]
    """Seconds of compute, recomputation and each kind of communication."""

    @property
    def total_bytes(self) -> float:
        return sum(self.memory_bytes.values())


def stage_anatomies(
    *, problem: TrainingProblem, config: ParallelConfig
) -> tuple[StageAnatomy, ...]:
    """Return the pipeline stages of a legal configuration, from first to last.

    Packed rows of unequal cost count with their mean cost. In contrast, the step time of an
    estimate includes the additional time of the slowest row.
    """
    candidate = Candidates.alone(config)
    parts = _stage_pipelines(problem, candidate)
    return tuple(
        _stage_anatomy(rank, part, case, candidate, problem)
        for rank, (part, case) in enumerate(parts)
    )


def _stage_pipelines(
    problem: TrainingProblem, candidate: Candidates
) -> Iterator[tuple[Pipeline, TrainingCase]]:
    """Yield each stage as a separate pipeline, with the case on its device."""
    p, layout, model = (
        int(candidate.pipeline_parallel_size),
        problem.strategy.pipeline_layout,
        problem.model,
    )
    if layout is not None:
        for rank in range(p):
            yield rank_contents(layout, rank=rank, stages=p, model=model).pipeline(model), problem
    elif p == 1 and not problem.cluster.kinds:
        m = micro_batches(candidate, workload=problem.workload)
        yield stages_and_layers(case=problem, candidates=candidate, micro_batches=m)[0], problem
    else:
        contents = (
            _mixed_rank_contents(problem, candidate, p)
            if problem.cluster.kinds
            else _rank_contents(problem, candidate, p)
        )
        for rank, (before, count, kinds, (first, last), case) in enumerate(contents):
            part = pipeline_part(
                model,
                candidate,
                first_rank=rank,
                layers_before=before,
                stages=1,
                layers=count,
                kinds=kinds,
                embedding=first,
                output=last,
            )
            yield part, case


def _rank_contents(problem: TrainingProblem, candidate: Candidates, p: int) -> Iterator[_Contents]:
    """Yield the contents of each pipeline rank for a query without a pipeline layout."""
    framework = framework_facts(problem.workload.framework)
    if framework.balances_blocks:
        layers, output_at = filled_contents(problem.model, p)
        counts = [float(count) for count in layers]
        ends = [(rank == 0, rank == output_at) for rank in range(p)]
    else:
        chunks = int(candidate.virtual_pipeline_parallel_size)
        layers = chunk_layers(
            num_layers=problem.model.total_layers,
            stages=p,
            chunks=chunks,
            late=framework.late_layers,
            begins_dense=problem.model.begins_dense,
        )
        counts = [float(sum(layers[rank::p])) for rank in range(p)]
        ends = [(rank == 0, rank == p - 1) for rank in range(p)]
        if candidate.is_v:
            counts = [float(layers[rank] + layers[2 * p - 1 - rank]) for rank in range(p)]
            ends = [(rank == 0, rank == 0) for rank in range(p)]
        elif candidate.pipeline_schedule == DUALPIPE:
            counts = [
                0.5 * (count + mirrored)
                for count, mirrored in zip(counts, reversed(counts), strict=True)
            ]
            ends = [(rank in (0, p - 1),) * 2 for rank in range(p)]
    kinds: Sequence[tuple[float, ...] | None] = [None] * p
    if len(problem.model.kinds) > 1:
        kinds = _rank_kinds(problem, candidate, p, late=framework.late_layers)
    for rank, count in enumerate(counts):
        yield sum(counts[:rank]), max(count, NO_LAYERS), kinds[rank], ends[rank], problem


def _rank_kinds(
    problem: TrainingProblem, candidate: Candidates, p: int, *, late: bool
) -> Sequence[tuple[float, ...]]:
    """Return the number of layers of each kind on each pipeline rank."""
    model, schedule = problem.model, int(candidate.pipeline_schedule)
    layers_by_kind = stage_contents(
        model.pattern,
        len(model.kinds),
        p,
        int(candidate.virtual_pipeline_parallel_size),
        schedule=schedule,
        late=late,
        begins_dense=model.begins_dense,
    )
    if schedule != DUALPIPE:
        return layers_by_kind
    return [
        tuple(0.5 * (own + other) for own, other in zip(stage, mirrored, strict=True))
        for stage, mirrored in zip(layers_by_kind, reversed(layers_by_kind), strict=True)
    ]


def _mixed_rank_contents(
    problem: TrainingProblem, candidate: Candidates, p: int
) -> Iterator[_Contents]:
    """Yield the contents of each stage of a pipeline on two kinds of devices.

    All stages on one kind of device have the same number of layers, as in `cost.pipeline_parts`.
    """
    layers = [float(count) for count in problem.costs(candidate).layers_by_kind]
    kinds = problem.kinds
    assert kinds  # there are two kinds
    first = int(stages_by_kind(kinds, candidate)[0])
    for rank in range(p):
        kind = int(rank >= first)
        before = min(rank, first) * layers[0] + max(rank - first, 0) * layers[1]
        yield before, layers[kind], None, (rank == 0, rank == p - 1), kinds[kind]


def _stage_anatomy(
    rank: int, part: Pipeline, case: TrainingCase, candidate: Candidates, problem: TrainingProblem
) -> StageAnatomy:
    costs = training_costs(
        case=case,
        candidates=candidate,
        pipeline=part,
        memory_headroom_fraction=problem.constraints.memory_headroom_fraction,
    )
    m = micro_batches(candidate, workload=problem.workload)
    has_all_layers, stage = part.part is None, part.stages[0]
    return StageAnatomy(
        rank=rank,
        gpu=case.cluster.gpu.name,
        layers=float(problem.model.total_layers)
        if has_all_layers
        else round(float(stage.layers.count - stage.extra_layers), 6),
        holds_embedding=has_all_layers or bool(part.embedding),
        holds_output=has_all_layers or bool(part.output),
        memory_bytes={name: float(size) for name, size in costs.memory_parts.items()},
        capacity_bytes=float(costs.capacity_bytes),
        seconds=float(stage_seconds(costs, profile=case.profile, micro_batches=m)),
        parts_s={name: float(costs.parts[name] / m) for name in PER_MICRO_BATCH},
    )


V_SHAPED = ("zbv", "dualpipe-v")
"""Schedules in which pipeline rank r of p runs the stages r and 2p - 1 - r."""
MAX_RANKS = 16
"""Maximum number of pipeline ranks shown. They are evenly spaced and include the first and the
last.
"""
MAX_STAGES = 128
"""Maximum number of pipeline stages for which a schedule is computed."""
SpanKind = Literal["F", "B", "W", "BW", "F+B"]
"""Kinds of spans: F is a forward pass, B computes input gradients, W computes weight gradients, BW
computes both, and F+B is a forward pass that overlaps a backward pass.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpan:
    """One span of a schedule, in seconds from the start of the step."""

    kind: SpanKind
    micro_batch: int
    """0-based index of the micro-batch. For F+B, it is the micro-batch of the forward pass."""
    chunk: int
    """0-based index of the model chunk within its rank."""
    start_s: float
    end_s: float
    critical: bool
    """Whether the span is on the critical path: if it took longer, so would the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """The spans of one pipeline rank."""

    rank: int
    spans: tuple[ScheduleSpan, ...]
    idle_fraction: float
    """Fraction of `Schedule.end_s` for which the rank is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The computed schedule of a pipeline.

    It excludes data-parallel communication and the optimizer step, which follow the pipeline. Of
    the exposed transfers between stages, it includes only the first and the last.
    """

    name: str
    num_ranks: int
    """Number of pipeline ranks. `rows` may contain fewer."""
    num_micro_batches: int
    """Number of micro-batches per step and replica."""
    drawn_micro_batches: int
    """Number of micro-batches shown. More would only prolong the steady phase."""
    end_s: float
    """End of the last micro-batch shown, in seconds."""
    rows: tuple[ScheduleRow, ...]


def execute_schedule(
    *, problem: TrainingProblem, config: ParallelConfig, each: Sequence[StageAnatomy]
) -> Schedule | None:
    """Return the schedule of a legal configuration with these stages; None without a pipeline or
    with more than MAX_STAGES stages.
    """
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    if not 1 < p <= MAX_STAGES:
        return None
    candidate = Candidates.alone(config)
    all_micro_batches = micro_batches(candidate, workload=problem.workload)
    m = int(all_micro_batches)
    name = config.pipeline_schedule or ("interleaved" if v > 1 else "1f1b")
    # Enough to show how the pipeline fills, runs and drains.
    enough = {
        "interleaved": 2 * p,
        "zbv": 2 * p + 2,
        "dualpipe": 2 * p + 4,
        "dualpipe-v": 2 * p + 4,
    }
    drawn = min(m, enough.get(name, p + 4))
    pipeline, layers = stages_and_layers(
        case=problem, candidates=candidate, micro_batches=all_micro_batches
    )
    layer = layers.mean_time(pipeline)
    work = [_operation_seconds(stage, layer) for stage in each]
    if name == "interleaved":
        orders = execution.interleaved(p=p, v=v, m=drawn)
    else:
        of_stages = {
            "gpipe": execution.gpipe,
            "zb-h1": execution.zb_h1,
            "zbv": execution.zbv,
            "dualpipe": execution.dualpipe,
            "dualpipe-v": execution.dualpipe_v,
        }
        orders = of_stages.get(name, execution.one_f_one_b)(p=p, m=drawn)
    transfer_s = float(transfer_seconds(case=problem, candidates=candidate))
    spans = execution.timeline(
        orders=orders, seconds=_operation_timer(name, work, p=p, v=v), transfer_s=transfer_s
    )
    end_s = max(row[-1].end_s for row in spans)
    critical = execution.critical_path(spans, transfer_s=transfer_s)
    ranks = (
        range(p)
        if p <= MAX_RANKS
        else [round(k * (p - 1) / (MAX_RANKS - 1)) for k in range(MAX_RANKS)]
    )
    return Schedule(
        name=name,
        num_ranks=p,
        num_micro_batches=m,
        drawn_micro_batches=drawn,
        end_s=end_s,
        rows=tuple(
            _schedule_row(rank, spans[rank], name=name, p=p, end_s=end_s, critical=critical)
            for rank in ranks
        ),
    )


def _operation_seconds(stage: StageAnatomy, layer: LayerTime) -> dict[str, float]:
    """Return the time in seconds of one micro-batch on one rank, summed over its model chunks, by
    kind of operation.

    The seconds of the stage, which include embedding, output layer and waiting for the host, are
    divided in the same proportions as those of `layer`, the mean layer of the critical stage.
    Recomputation counts as part of the backward pass.
    """
    forward = weight = 0.0
    compute_s, compute_backward_s = (
        layer.forward - layer.attention,
        layer.backward - layer.attention_backward,
    )
    for name, ahead, back in (
        ("compute", compute_s, compute_backward_s),
        ("attention", layer.attention, layer.attention_backward),
        ("tensor_parallel", layer.tensor, layer.tensor_backward),
        ("context_parallel", layer.context, layer.context_backward),
        ("expert_parallel", layer.expert, layer.expert_backward),
    ):
        both = float(ahead + back)
        if both:
            forward += stage.parts_s[name] * float(ahead) / both
    if compute_s + compute_backward_s:
        weight = (
            stage.parts_s["compute"]
            * float(layer.weight_gradient)
            / float(compute_s + compute_backward_s)
        )
    busy = sum(stage.parts_s.values())
    stretch = stage.seconds / busy if busy else 1.0
    forward_s, backward_s, weight_s = (
        stretch * forward,
        stretch * (busy - forward - weight),
        stretch * weight,
    )
    return {"F": forward_s, "B": backward_s, "W": weight_s, "BW": backward_s + weight_s}


def _operation_timer(
    name: str, work: Sequence[dict[str, float]], *, p: int, v: int
) -> Callable[[Operation], float]:
    """Return a function that returns an operation's time in seconds: its rank's time divided by
    the number of model chunks.

    A DualPipe stage is on two ranks. Its seconds are those of the first rank.
    """

    def seconds(operation: Operation) -> float:
        stage = operation.stage
        rank = min(stage, 2 * p - 1 - stage) if name in V_SHAPED else stage % p
        return work[rank][operation.kind] / v

    return seconds


def _schedule_row(
    rank: int,
    spans: Sequence[Span],
    *,
    name: str,
    p: int,
    end_s: float,
    critical: Set[tuple[int, int]],
) -> ScheduleRow:
    drawn = []
    for place, span in enumerate(spans):
        first = span.block[0]
        kind: SpanKind = first.kind if len(span.block) == 1 else "F+B"
        chunk = int(first.stage >= p) if name in V_SHAPED else first.stage // p
        drawn.append(
            ScheduleSpan(
                kind=kind,
                micro_batch=first.micro_batch,
                chunk=chunk,
                start_s=span.start_s,
                end_s=span.end_s,
                critical=(rank, place) in critical,
            )
        )
    busy = sum(span.end_s - span.start_s for span in spans)
    return ScheduleRow(rank=rank, spans=tuple(drawn), idle_fraction=1.0 - busy / end_s)


MAX_NODES = 16
"""Maximum number of nodes shown. The other nodes continue the pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A device: its global rank, and its 0-based index in each parallel dimension."""

    rank: int
    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host with its devices, in order."""

    index: int
    ranks: tuple[RankPlace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """A group of ranks that communicate with each other in one parallel dimension."""

    name: str
    size: int
    in_domain: int
    """Number of its ranks inside one NVLink domain, or inside one node if no domain is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Assignment of ranks to devices. Ranks are numbered along the dimensions in `order`, innermost
    first, and fill one node after another.
    """

    order: str
    num_nodes: int
    gpus_per_node: int
    nvlink_domain_size: int
    nodes: tuple[Node, ...]
    """The first nodes, at most MAX_NODES."""
    groups: tuple[RankGroup, ...]
    """Groups with at least two ranks."""


def place_ranks(*, config: ParallelConfig, cluster: ClusterSpec) -> Placement:
    """Return the placement of a configuration that uses all devices of the cluster."""
    sizes = {
        "tp": config.tensor_parallel_size,
        "cp": config.context_parallel_size,
        "dp": config.data_parallel_size,
        "pp": config.pipeline_parallel_size,
    }
    order = [name for name in cluster.rank_order.split("-") if name in sizes]
    per_node = cluster.gpus_per_node
    num_nodes = cluster.num_gpus // per_node

    def place(rank: int) -> RankPlace:
        at, left = {}, rank
        for name in order:
            left, at[name] = divmod(left, sizes[name])
        return RankPlace(
            rank=rank, tensor=at["tp"], context=at["cp"], data=at["dp"], pipeline=at["pp"]
        )

    return Placement(
        order="-".join(order),
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        nvlink_domain_size=cluster.nvlink_domain_size,
        nodes=tuple(
            Node(index=node, ranks=tuple(map(place, range(node * per_node, (node + 1) * per_node))))
            for node in range(min(num_nodes, MAX_NODES))
        ),
        groups=_rank_groups(Candidates.alone(config), cluster),
    )


def _rank_groups(c: Candidates, cluster: ClusterSpec) -> tuple[RankGroup, ...]:
    groups = []
    for name, axis in (
        ("tensor", "tp"),
        ("context", "cp"),
        ("expert", "ep"),
        ("data", "dp"),
        ("pipeline", "pp"),
    ):
        group = (expert_group if axis == "ep" else dense_group)(c, axis, cluster=cluster)
        groups.append(RankGroup(name=name, size=int(group.size), in_domain=int(group.in_domain)))
    return tuple(group for group in groups if group.size > 1)


def step_excess(known: Estimate, measured_s: float | None) -> dict[str, float]:
    """Return the time of a step by label, in seconds; empty if the estimate has no parts.

    The labels are, in this order: ideal compute (the model's FLOPs at the peak rate), the
    additional time of matmuls and attention, each other part, and the measured minus the predicted
    step time.
    """
    if known.time is None or known.mfu is None or not known.time.parts_s:
        return {}
    ideal_s = known.mfu * known.time.step_s
    busy = ("compute", "attention")
    parts = {
        "ideal compute": ideal_s,
        "below peak": sum(known.time.parts_s.get(name, 0.0) for name in busy) - ideal_s,
    }
    parts |= {
        PARTS[name].label: seconds
        for name, seconds in known.time.parts_s.items()
        if name not in busy and seconds
    }
    if measured_s is not None:
        parts["measured, not explained"] = measured_s - known.time.step_s
    return parts


def schedule_of(configuration: Configuration) -> tuple[Schedule | None, float | None]:
    """Return the pipeline schedule of a training configuration, and the pipeline bubble as a
    fraction of the step time. Both are None without a pipeline.
    """
    parallel = configuration.parallel
    if not isinstance(parallel, ParallelConfig) or parallel.pipeline_parallel_size == 1:
        return None, None
    try:
        one = resolve_configuration(configuration.query)
        time = one.estimate(with_fixes=False).time
    except HpToolError:  # A query of another version; pages show only stored values.
        return None, None
    stages = stage_anatomies(problem=one.problem, config=one.config)
    schedule = execute_schedule(problem=one.problem, config=one.config, each=stages)
    return schedule, time.parts_s["pipeline_bubble"] / time.step_s if time else None
