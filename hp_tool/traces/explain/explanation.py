"""A recorded training beside its prediction, part by part, and what would make its steps
shorter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hp_tool.cost.roofline import peak_flops
from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange.export import options, written_otherwise
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training.changes import Change, changes
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.traces.explain.checks import Check, Teaching, checks, teaching
from hp_tool.traces.explain.findings import Finding, findings
from hp_tool.traces.explain.parts import StepPart, step_parts
from hp_tool.traces.timeline import (
    Fault,
    RankEvents,
    StepSplit,
    Timeline,
    exposed_s,
    faults,
    timeline,
)
from hp_tool.traces.timeline.split import UNKNOWN
from hp_tool.traces.timeline.use import LinkUse, link_use, matmul_flops_per_second
from hp_tool.traces.timeline.workload import Workload, workload_of

MAX_UNKNOWN_SHARE = 0.1
"""Share of the step in unknown kernels beyond which a trace teaches the step time, and not its
parts.
"""
MAX_UNKNOWN_KERNELS = 5
"""Names of unknown kernels in an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """The typical step on one rank."""

    rank: int
    step_s: float
    own_s: float
    """Without waits for other ranks."""
    parts_s: dict[str, float]
    """By the parts of a prediction; they sum to step_s."""
    hidden_s: dict[str, float]
    """Communication beneath computing, by part."""
    waits_s: dict[str, float]
    """Seconds of the parts in which a collective waits for another rank; pipeline_p2p's are the
    bubble.
    """
    host_s: float
    """Seconds of `overhead` in which the host was late with what ran next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion(Change):
    """A change, and what to write for it."""

    changed: ChosenValues = field(default_factory=dict)
    """New values of the query, by path."""
    flags: tuple[dict[str, str | None], ...] = ()
    """{flag, from, to} in the tool's words; the query's paths where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownKernel:
    """A kernel that no rule recognizes."""

    name: str
    """Its first characters."""
    seconds: float
    """In all that was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where the seconds of recorded steps went, beside where they should have gone."""

    id: str | None = None
    """The query's."""
    status: Literal["ok"] = "ok"
    steps: int
    """Recorded steps that all ranks have."""
    marked: bool
    """Whether steps were marked or found; else everything recorded counts as one."""
    device: str
    """As the trace names it; empty where it does not."""
    workload: Workload
    """What was recorded. `inference`: forward passes alone, without signs of a serving engine."""
    step_s: float
    """The step of median length on the critical rank; all figures of ranks are of it."""
    critical_rank: int
    """The one that others wait for."""
    ranks: tuple[RankStep, ...]
    links: tuple[LinkUse, ...]
    """Collectives on the critical rank."""
    matmul_flops_per_second: float | None
    """While matmul kernels run, on the critical rank; None where shapes were not recorded."""
    tensor_core_share: float | None
    """Of the device's peak; None without a query or shapes."""
    faults: tuple[Fault, ...]
    """What cost a tenth of the step or more, held against other ranks and groups."""
    estimate: Estimate | None = None
    """The prediction for the query's configuration; None without a query."""
    parts: tuple[StepPart, ...] = ()
    """The largest difference between measured and predicted first; without a query, the longest."""
    suggestions: tuple[Suggestion, ...] = ()
    findings: tuple[Finding, ...] = ()
    """In words, by seconds."""
    query: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    """The step as a measurement: a line of `hp-tool calibrate --measurements`, the body of POST
    /v1/measurements. None without a query, and if a check shows that the trace is not of the
    query's training.
    """
    checks: tuple[Check, ...] = ()
    """Whether the trace is of the query's training; empty without a query."""
    teaches: Teaching | None = None
    """What becomes of the step as a measurement: applied, held until someone accepts it, or
    refused. None without a query.
    """
    unknown_share: float = 0.0
    """Share of the step in kernels that no rule recognizes."""
    unknown_kernels: tuple[UnknownKernel, ...] = ()
    """The longest of them on the critical rank."""
    trace_query: dict[str, Any] = field(default_factory=dict)
    """What the trace itself says of its configuration, by path of a query."""

    @property
    def critical(self) -> RankStep:
        """The critical rank's step."""
        return next(each for each in self.ranks if each.rank == self.critical_rank)


def explain(
    ranks: Sequence[RankEvents], *, query: Query | None = None, tool: str | None = None
) -> Explanation:
    """Explain the recorded steps of `ranks`, held against the prediction for `query`'s one
    configuration if that is given.

    `tool`: the format whose flags suggestions are written in. Raises InputError for a trace without
    a kernel, HpToolError for a query that cannot be predicted.
    """
    line = timeline(ranks)
    if not line.ranks:
        raise InputError(
            "the traces hold no kernel, operator or collective: nothing ran while they were "
            "recorded",
            field="trace",
        )
    row, step = line.critical, line.typical
    shown = tuple(
        _rank_step(events.rank, own[step])
        for events, own in zip(line.ranks, line.splits, strict=True)
    )
    rate = matmul_flops_per_second(line, row=row)
    known: dict[str, Any] = {}
    if query is not None:
        known = _beside(line, query, tool=tool, rate=rate)
    measured_s = line.splits[row][step].parts_s
    parts = step_parts(
        measured_s, known.get("estimate"), covers={part: (part,) for part in measured_s}
    )
    explanation = Explanation(
        id=None if query is None else query.id,
        steps=len(line.splits[0]),
        marked=line.marked,
        device=line.ranks[row].device,
        step_s=shown[row].step_s,
        critical_rank=line.ranks[row].rank,
        ranks=shown,
        parts=tuple(sorted(parts, key=lambda part: -abs(part.excess_s or part.measured_s))),
        links=link_use(line, row=row),
        matmul_flops_per_second=rate,
        tensor_core_share=known.pop("share", None),
        faults=faults(line),
        workload=workload_of(line.ranks),
        unknown_share=shown[row].parts_s[UNKNOWN] / shown[row].step_s,
        unknown_kernels=_unknown_kernels(line.ranks[row]),
        trace_query=_said_by_trace(line),
        **known,
    )
    return _with_findings(explanation, exposed=exposed_s(line))


def _unknown_kernels(events: RankEvents) -> tuple[UnknownKernel, ...]:
    longest = sorted(events.signs.unknown_s.items(), key=lambda each: -each[1])[
        :MAX_UNKNOWN_KERNELS
    ]
    return tuple(UnknownKernel(name=name, seconds=seconds) for name, seconds in longest)


def _with_findings(explanation: Explanation, *, exposed: Mapping[str, float]) -> Explanation:
    return replace(
        explanation,
        findings=findings(
            faults=explanation.faults,
            parts=explanation.parts,
            suggestions=explanation.suggestions,
            step_s=explanation.step_s,
            exposed_s=exposed,
            workload=explanation.workload,
            compared=explanation.query is not None,
            recorded_ranks=len(explanation.ranks),
            unknown=[each.name for each in explanation.unknown_kernels],
            unknown_s=explanation.critical.parts_s[UNKNOWN],
        ),
    )


def _rank_step(rank: int, step: StepSplit) -> RankStep:
    return RankStep(
        rank=rank,
        step_s=step.step_s,
        own_s=step.own_s,
        parts_s=step.parts_s,
        hidden_s=step.hidden_s,
        waits_s=step.waits_s,
        host_s=step.host_s,
    )


def _beside(
    line: Timeline, query: Query, *, tool: str | None, rate: float | None
) -> dict[str, Any]:
    """Prediction, checks and suggestions."""
    if query.kind != "training":
        raise UnsupportedError(
            "traces of serving are not explained; give a training query", field="query"
        )
    resolved = resolve_configuration(query)
    estimate = resolved.estimate(with_fixes=False)
    if estimate.time is None:
        reason = estimate.reasons[0]
        raise InputError(
            f"this configuration cannot have run: {reason.message}",
            field="parallel",
            code=reason.code,
        )
    measured = line.splits[line.critical][line.typical].parts_s
    problem = resolved.problem
    peak = peak_flops(problem.cluster.gpu, precision=problem.workload.precision)
    trains = workload_of(line.ranks) in ("training", "unknown")
    chosen = (
        changes(query, estimate=estimate, measured_s=measured)
        if estimate.feasible and trains
        else ()
    )
    made = checks(line, problem=problem, config=resolved.config, sizes=_said_by_trace(line))
    return {
        "estimate": estimate,
        "query": schema.query_mapping(query),
        "report": None if teaching(made) == "refused" else _report(query, measured),
        "checks": made,
        "teaches": teaching(made),
        "suggestions": tuple(
            _suggestion(each, query=query, estimate=estimate, tool=tool) for each in chosen
        ),
        "share": None if rate is None or not math.isfinite(peak) else rate / peak,
    }


def _report(query: Query, measured_s: dict[str, float]) -> dict[str, Any]:
    """Return the step as a measurement. A few unknown kernels count as computing; beyond that no
    part is known.
    """
    mapping = schema.query_mapping(query)
    parallel = mapping.pop("parallel", {})
    step_s, unknown_s = sum(measured_s.values()), measured_s[UNKNOWN]
    measurement: dict[str, Any] = {"step_s": step_s}
    if unknown_s <= MAX_UNKNOWN_SHARE * step_s:
        known_s = {part: seconds for part, seconds in measured_s.items() if part != UNKNOWN}
        measurement["parts_s"] = known_s | {"compute": known_s["compute"] + unknown_s}
    return {"query": mapping, "parallel": parallel, "measurement": measurement}


def _suggestion(
    change: Change, *, query: Query, estimate: Estimate, tool: str | None
) -> Suggestion:
    """The change with its flags."""
    assert estimate.parallel is not None
    before = Configuration(query=query, parallel=estimate.parallel)
    after = Configuration.of(change, query=query)
    values: dict[str, Any] = {name: getattr(change, name) for name in Change.__slots__}
    old, new = _paths(before), _paths(after)
    changed = {path: value for path, value in new.items() if old.get(path) != value}
    return Suggestion(**values, changed=changed, flags=_flags(before, after, tool))


def _flags(
    before: Configuration, after: Configuration, tool: str | None
) -> tuple[dict[str, str | None], ...]:
    """{flag, from, to} of what two configurations write otherwise, in the tool's words or the
    query's paths.
    """
    one: Mapping[str, str] = {}
    other: Mapping[str, str] = {}
    if tool is not None:
        with contextlib.suppress(UnsupportedError):
            one, other = options(before, tool), options(after, tool)
    if one == other:
        one, other = (
            {path: str(value) for path, value in _paths(each).items()} for each in (before, after)
        )
    return written_otherwise(one, other)


def _paths(configuration: Configuration) -> dict[str, Any]:
    """Values of `parallel` and of training.overlap by path of the query."""
    training = configuration.query.training
    overlap = (
        {} if training is None or training.overlap is None else schema.to_dict(training.overlap)
    )
    values = {
        f"parallel.{name}": value for name, value in schema.to_dict(configuration.parallel).items()
    }
    values |= {f"training.overlap.{name}": value for name, value in overlap.items()}
    return {path: value for path, value in values.items() if value is not None}


UNNAMED_GROUPS = ("default_pg", "undefined")
"""torch's descriptions of its group of all ranks, and of groups that were made without one: they
tell no size of the layout.
"""
_SIZES = {
    "tensor_parallel": "tensor_parallel_size",
    "pipeline_p2p": "pipeline_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_parallel_size",
}


def _said_by_trace(line: Timeline) -> dict[str, Any]:
    """Sizes of groups whose ranks were recorded."""
    sizes: dict[str, Any] = {}
    for events in line.ranks:
        for group in events.groups:
            if (
                group.name not in UNNAMED_GROUPS
                and group.part in _SIZES
                and len(group.ranks) > 1
                and "TENSOR_AND" not in group.name
            ):
                path = f"parallel.{_SIZES[group.part]}"
                sizes[path] = max(sizes.get(path, 1), len(group.ranks))
    return sizes
