"""Answers as small HTML tables, for notebooks (`_repr_html_`). All text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape

from hp_tool.domain.result import Estimate, MemoryEstimate, Reason, Recommendation, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, ServingMemory, ServingRecommendation
from hp_tool.render.words import arithmetic, configuration_cells, serving_arithmetic
from hp_tool.units import duration, gib


def estimate_html(estimate: Estimate | InferenceEstimate, calibrated: Estimate | None = None) -> str:
    """One configuration: its verdict, time and memory by part."""
    parts = []
    if isinstance(estimate, InferenceEstimate):
        if estimate.parallel is not None:
            parts.append(_line(serving_arithmetic(estimate.parallel, replicas=estimate.replicas)))
        parts += _reasons(estimate.reasons)
        if estimate.ttft_s is not None:
            parts.append(_table(_SERVING_HEADS, [_serving_cells(estimate)]))
    else:
        if estimate.parallel is not None:
            parts.append(_line(arithmetic(estimate.parallel)))
        parts += _reasons(estimate.reasons)
        if estimate.time is not None:
            parts.append(_table(_TRAINING_HEADS, [_training_cells(estimate)]))
            step = estimate.time.step_s
            shares = [(name, duration(s), f"{s / step:.1%}") for name, s in estimate.time.parts_s.items() if s > 0.0]
            parts.append(_table(("time", "exposed", "share"), shares))
        if calibrated is not None and calibrated.time is not None:
            parts.append(_line(f"after what was measured on this cluster: {duration(calibrated.time.step_s)}"))
    if estimate.memory is not None:
        parts.append(_memory(estimate.memory))
    return "".join(parts)


def recommendations_html(
    rows: Sequence[Recommendation] | Sequence[ServingRecommendation],
    *,
    space: SpaceSummary,
    misses: Sequence[Recommendation] | Sequence[ServingRecommendation],
) -> str:
    """The ranked configurations; where there are none, what comes nearest."""
    if rows:
        body = _ranked(rows)
    else:
        near = "".join(_line(f"nearest: {_layout(miss)}") + "".join(_reasons(miss.estimate.reasons)) for miss in misses)
        body = _line("no configuration is acceptable") + near
    return body + _line(f"{space.legal:,} legal configurations, {space.feasible:,} of them acceptable")


def _ranked(rows: Sequence[Recommendation] | Sequence[ServingRecommendation]) -> str:
    training = [row for row in rows if isinstance(row, Recommendation)]
    if training:
        heads, cells = configuration_cells([row.parallel for row in training])
        figures = [_training_cells(row.calibrated_estimate or row.estimate) for row in training]
        return _table(
            ("rank", "group", *heads, *_TRAINING_HEADS, "risk"),
            ((str(r.rank), str(r.group or "-"), *c, *f, _risk(r)) for r, c, f in zip(training, cells, figures, strict=True)),
        )
    serving = [row for row in rows if isinstance(row, ServingRecommendation)]
    cells = [[_layout(r), *_serving_cells(r.estimate)] for r in serving]
    return _table(("rank", "layout", *_SERVING_HEADS), ((str(r.rank), *c) for r, c in zip(serving, cells, strict=True)))


def _layout(row: Recommendation | ServingRecommendation) -> str:
    if isinstance(row, ServingRecommendation):
        return serving_arithmetic(row.parallel, replicas=row.estimate.replicas)
    return arithmetic(row.parallel)


_TRAINING_HEADS = ("step", "tokens/s/GPU", "MFU", "memory", "days")
_SERVING_HEADS = ("users", "TTFT", "TPOT", "request", "tokens/s/GPU", "memory")


def _risk(row: Recommendation) -> str:
    """The chance of running out of memory."""
    return "-" if row.out_of_memory_probability is None else f"{row.out_of_memory_probability:.1%}"


def _training_cells(e: Estimate) -> tuple[str, ...]:
    assert e.time is not None and e.memory is not None  # of a legal configuration
    days = f"{e.calendar_days:.1f}" if e.calendar_days is not None else "-"
    return duration(e.time.step_s), f"{e.tokens_per_second_per_gpu:,.0f}", f"{e.mfu:.1%}", gib(e.memory.total_bytes), days


def _serving_cells(e: InferenceEstimate) -> tuple[str, ...]:
    assert e.ttft_s is not None and e.tpot_s is not None and e.request_latency_s is not None and e.memory is not None
    latencies = (duration(e.ttft_s), duration(e.tpot_s), duration(e.request_latency_s))
    return f"{e.users:,}", *latencies, f"{e.output_tokens_per_second_per_gpu:,.0f}", gib(e.memory.total_bytes)


def _memory(memory: MemoryEstimate | ServingMemory) -> str:
    rows = [(name, gib(size)) for name, size in memory.parts_bytes.items()]
    return _table(("memory", f"{gib(memory.total_bytes)} of {gib(memory.capacity_bytes)}"), rows)


def _reasons(reasons: Sequence[Reason]) -> list[str]:
    return [_line("; ".join(f"{reason.code}: {reason.message}" for reason in reasons))] if reasons else []


def _line(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
