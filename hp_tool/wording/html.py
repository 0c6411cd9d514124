"""Answers as small HTML tables, for notebooks (`_repr_html_`). All text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape

from hp_tool.domain.parts import label
from hp_tool.domain.result import Estimate, MemoryEstimate, Reason, Recommendation, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, ServingMemory, ServingRecommendation
from hp_tool.domain.units import duration, gib
from hp_tool.wording import rankings
from hp_tool.wording.columns import (
    Column,
    configuration_columns,
    listed_columns,
    printed,
    serving_columns,
    versus_first,
)
from hp_tool.wording.fit import chance, left_open, needs
from hp_tool.wording.words import arithmetic, cache_words, serving_arithmetic


def estimate_html(
    estimate: Estimate | InferenceEstimate, calibrated: Estimate | None = None
) -> str:
    """Return one configuration: its verdict, time and memory by part.

    Figures of a training are those of `calibrated` if there is one.
    """
    if isinstance(estimate, InferenceEstimate):
        return _serving(estimate)
    known, parts = calibrated or estimate, []
    if known.parallel is not None:
        parts.append(_line(arithmetic(known.parallel)))
    parts += _reasons(known.reasons)
    if known.time is not None:
        parts.append(_columns(printed(rankings.TRAINING_FIGURES, [known])))
        if known.fit is not None:
            parts.append(_line(f"{known.fit}: {chance(known)}; {needs(known)}"))
        parts += map(_line, left_open(known))
        step = known.time.step_s
        shares = [
            (label(name), duration(s), f"{s / step:.1%}")
            for name, s in known.time.parts_s.items()
            if s > 0.0
        ]
        parts.append(_table(("time", "exposed", "share"), shares))
    if calibrated is not None and estimate.time is not None:
        without = duration(estimate.time.step_s)
        parts.append(_line(f"Calibrated on this cluster; {without} per step without."))
    if known.memory is not None:
        parts.append(_memory(known.memory))
    return "".join(parts)


def _serving(estimate: InferenceEstimate) -> str:
    parts = []
    if estimate.parallel is not None:
        parts.append(_line(serving_arithmetic(estimate.parallel, replicas=estimate.replicas)))
    parts += _reasons(estimate.reasons)
    if estimate.ttft_s is not None:
        parts.append(_columns(printed(rankings.SERVING_FIGURES, [estimate])))
    if estimate.kv_cache is not None:
        parts.append(_line(cache_words(estimate.kv_cache)))
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
        near = "".join(
            _line(f"nearest: {_layout(miss)}") + "".join(_reasons(miss.estimate.reasons))
            for miss in misses
        )
        body = _line("no configuration is acceptable") + near
    return body + _line(
        f"{space.legal:,} legal configurations, {space.feasible:,} of them acceptable"
    )


def _ranked(rows: Sequence[Recommendation] | Sequence[ServingRecommendation]) -> str:
    ranks = printed([rankings.RANK], rows)
    serving = [row for row in rows if isinstance(row, ServingRecommendation)]
    if serving:
        figures = printed(rankings.SERVING_FIGURES, serving)
        return _columns([*ranks, *serving_columns(serving), *figures])
    training = [row for row in rows if isinstance(row, Recommendation)]
    layouts = [
        *configuration_columns([row.parallel for row in training]),
        *listed_columns(training),
    ]
    figures = printed([*rankings.TRAINING_FIGURES, rankings.RISK], training)
    return _columns([*ranks, *layouts, *figures, *versus_first(training)])


def _layout(row: Recommendation | ServingRecommendation) -> str:
    if isinstance(row, ServingRecommendation):
        return serving_arithmetic(row.parallel, replicas=row.estimate.replicas)
    return arithmetic(row.parallel)


def _columns(columns: Sequence[Column]) -> str:
    return _table(
        [column.title for column in columns],
        zip(*(column.cells for column in columns), strict=True),
    )


def _memory(memory: MemoryEstimate | ServingMemory) -> str:
    rows = [(name, gib(size)) for name, size in memory.parts_bytes.items()]
    return _table(("memory", f"{gib(memory.total_bytes)} of {gib(memory.capacity_bytes)}"), rows)


def _reasons(reasons: Sequence[Reason]) -> list[str]:
    return (
        [_line("; ".join(f"{reason.code}: {reason.message}" for reason in reasons))]
        if reasons
        else []
    )


def _line(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
