"""Explain recorded training: measured and predicted parts, and changes that shorten a step."""

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
from hp_tool.formats.exchange.export import changed_options, tool_options
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training.changes import Change, saving_changes
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.usual_settings import answer_with_usual_settings
from hp_tool.traces.explain.checks import Check, Teaching, measurement_use, run_checks
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
"""If unknown kernels take more than this fraction of a step, only the step time is used, not its
parts.
"""
MAX_UNKNOWN_KERNELS = 5
"""Maximum number of unknown kernel names in a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """The step of median length on one rank."""

    rank: int
    step_s: float
    own_s: float
    """Step time without waits for other ranks, in seconds."""
    parts_s: dict[str, float]
    """Seconds by predicted part; their sum is step_s."""
    hidden_s: dict[str, float]
    """Communication that overlaps with compute, in seconds by part."""
    waits_s: dict[str, float]
    """Time in `parts_s` during which a collective waits for another rank, in seconds by part. The
    waits in pipeline_p2p are the pipeline bubble.
    """
    host_s: float
    """Part of `overhead` caused by late kernel launches on the host, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion(Change):
    """A suggested change, and how to write it."""

    changed: ChosenValues = field(default_factory=dict)
    """Changed values by query path."""
    flags: tuple[dict[str, str | None], ...] = ()
    """Changed options as {flag, from, to}. They are the tool's flags, or query paths if it has
    none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownKernel:
    """A kernel that no rule recognizes."""

    name: str
    """Kernel name, truncated."""
    seconds: float
    """Total time in the recording, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Measured and predicted seconds of recorded steps by part, with the reasons for
    differences.
    """

    id: str | None = None
    """The query's id."""
    status: Literal["ok"] = "ok"
    steps: int
    """Number of recorded steps that are available on all ranks."""
    marked: bool
    """True if step boundaries were marked or found. Otherwise, the recording counts as one step."""
    device: str
    """Device name in the trace; empty if not recorded."""
    workload: Workload
    """Kind of recorded work. `inference` means forward passes without signs of a serving engine."""
    step_s: float
    """Median step time on the critical rank, in seconds. Per-rank metrics describe this step."""
    critical_rank: int
    """Rank that the other ranks wait for."""
    ranks: tuple[RankStep, ...]
    links: tuple[LinkUse, ...]
    """Collectives on the critical rank."""
    matmul_flops_per_second: float | None
    """FLOP/s on the critical rank while matmul kernels run; None if shapes were not recorded."""
    tensor_core_share: float | None
    """This rate as a fraction of the device's peak FLOP/s; None without a query or shapes."""
    faults: tuple[Fault, ...]
    """Causes that cost at least a tenth of the step. They are found by comparing ranks and groups.
    """
    estimate: Estimate | None = None
    """The prediction for the query's configuration; None without a query."""
    parts: tuple[StepPart, ...] = ()
    """Parts of the step, sorted by measured minus predicted time; without a query, by measured
    time.
    """
    suggestions: tuple[Suggestion, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Findings as sentences, sorted by lost seconds."""
    query: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    """The step as a measurement. It is a line for `hp-tool calibrate --measurements` and a body for
    POST /v1/measurements. None without a query, or if a check shows that the trace belongs to a
    different job.
    """
    checks: tuple[Check, ...] = ()
    """Checks that the trace matches the query. Empty without a query."""
    teaches: Teaching | None = None
    """How the step may be used as a measurement: applied, held until accepted, or refused. None
    without a query.
    """
    unknown_share: float = 0.0
    """Fraction of the step spent in kernels that match no rule."""
    unknown_kernels: tuple[UnknownKernel, ...] = ()
    """Longest unknown kernels on the critical rank."""
    trace_query: dict[str, Any] = field(default_factory=dict)
    """Configuration recorded in the trace, by query path."""

    @property
    def critical(self) -> RankStep:
        """Step of the critical rank."""
        return next(rank for rank in self.ranks if rank.rank == self.critical_rank)


def explain(
    ranks: Sequence[RankEvents], *, query: Query | None = None, tool: str | None = None
) -> Explanation:
    """Explain recorded steps. If `query` is given, compare them with its prediction.

    Args:
        ranks: Events of the recorded ranks.
        query: A training query with a single configuration.
        tool: Framework or format whose flags the suggestions use.

    Raises:
        InputError: The trace has no kernels.
        HpToolError: The query cannot be predicted.
    """
    line = timeline(ranks)
    if not line.ranks:
        raise InputError(
            "The traces contain no kernels, operators or collectives. Record while the training "
            "runs.",
            field="trace",
        )
    row, step = line.critical, line.typical
    shown = tuple(
        _rank_step(events.rank, steps[step])
        for events, steps in zip(line.ranks, line.splits, strict=True)
    )
    rate = matmul_flops_per_second(line, row=row)
    compared: dict[str, Any] = {}
    if query is not None:
        compared = _compare_with_query(line, query, tool=tool, rate=rate)
    measured_s = line.splits[row][step].parts_s
    parts = step_parts(
        measured_s, compared.get("estimate"), covers={part: (part,) for part in measured_s}
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
        tensor_core_share=compared.pop("share", None),
        faults=faults(line),
        workload=workload_of(line.ranks),
        unknown_share=shown[row].parts_s[UNKNOWN] / shown[row].step_s,
        unknown_kernels=_unknown_kernels(line.ranks[row]),
        trace_query=_sizes_in_trace(line),
        **compared,
    )
    return _with_findings(explanation, exposed=exposed_s(line))


def _unknown_kernels(events: RankEvents) -> tuple[UnknownKernel, ...]:
    longest = sorted(events.signs.unknown_s.items(), key=lambda item: -item[1])[
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
            unknown=[kernel.name for kernel in explanation.unknown_kernels],
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


def _compare_with_query(
    line: Timeline, query: Query, *, tool: str | None, rate: float | None
) -> dict[str, Any]:
    if query.kind != "training":
        raise UnsupportedError("explain supports training queries only", field="query")
    resolved = resolve_configuration(query)
    assumed, estimate = answer_with_usual_settings(query, resolved=resolved)
    if estimate.time is None:
        reason = estimate.reasons[0]
        raise InputError(
            f"The query's configuration cannot run: {reason.message}",
            field="parallel",
            code=reason.code,
        )
    measured = line.splits[line.critical][line.typical].parts_s
    problem = resolved.problem
    peak = peak_flops(problem.cluster.gpu, precision=problem.workload.precision)
    trains = workload_of(line.ranks) in ("training", "unknown")
    chosen = (
        saving_changes(assumed, estimate=estimate, measured_s=measured)
        if estimate.feasible and trains
        else ()
    )
    trace_checks = run_checks(
        line, problem=problem, config=resolved.config, sizes=_sizes_in_trace(line)
    )
    return {
        "estimate": estimate,
        "query": schema.query_mapping(query),
        "report": None
        if measurement_use(trace_checks) == "refused"
        else _measurement_report(query, measured),
        "checks": trace_checks,
        "teaches": measurement_use(trace_checks),
        "suggestions": tuple(
            _make_suggestion(change, query=query, assumed=assumed, estimate=estimate, tool=tool)
            for change in chosen
        ),
        "share": None if rate is None or not math.isfinite(peak) else rate / peak,
    }


def _measurement_report(query: Query, measured_s: dict[str, float]) -> dict[str, Any]:
    """Return the step as a measurement.

    Time in unknown kernels counts as compute if its share is at most MAX_UNKNOWN_SHARE. Otherwise,
    the parts are omitted.
    """
    mapping = schema.query_mapping(query)
    parallel = mapping.pop("parallel", {})
    step_s, unknown_s = sum(measured_s.values()), measured_s[UNKNOWN]
    measurement: dict[str, Any] = {"step_s": step_s}
    if unknown_s <= MAX_UNKNOWN_SHARE * step_s:
        recognized_s = {part: seconds for part, seconds in measured_s.items() if part != UNKNOWN}
        measurement["parts_s"] = recognized_s | {"compute": recognized_s["compute"] + unknown_s}
    return {"query": mapping, "parallel": parallel, "measurement": measurement}


def _make_suggestion(
    change: Change, *, query: Query, assumed: Query, estimate: Estimate, tool: str | None
) -> Suggestion:
    """Return a suggested change: the changed query values, and the tool's flags for them.

    Values are compared with the usual settings filled in. The flags are derived from the query as
    given, because the tool may not support some of the usual settings. They differ only by the
    change.
    """
    assert estimate.parallel is not None
    before, after = (
        _values_by_path(configuration)
        for configuration in (
            Configuration(query=assumed, parallel=estimate.parallel),
            Configuration.from_row(change, query=assumed),
        )
    )
    values: dict[str, Any] = {name: getattr(change, name) for name in Change.__slots__}
    changed = {path: value for path, value in after.items() if before.get(path) != value}
    flags: tuple[dict[str, str | None], ...] = ()
    if tool is not None:
        with contextlib.suppress(UnsupportedError):
            flags = changed_options(
                tool_options(Configuration(query=query, parallel=estimate.parallel), tool),
                tool_options(Configuration.from_row(change, query=query), tool),
            )
    return Suggestion(
        **values, changed=changed, flags=flags or changed_options(_words(before), _words(after))
    )


def _words(values: Mapping[str, Any]) -> dict[str, str]:
    return {path: str(value) for path, value in values.items()}


def _values_by_path(configuration: Configuration) -> dict[str, Any]:
    """Return the values of `parallel` and `training.overlap` by query path."""
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
"""torch's descriptions of the group of all ranks, and of groups without a description. Their sizes
reveal nothing about the layout.
"""
_SIZES = {
    "tensor_parallel": "tensor_parallel_size",
    "pipeline_p2p": "pipeline_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_parallel_size",
}


def _sizes_in_trace(line: Timeline) -> dict[str, Any]:
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
