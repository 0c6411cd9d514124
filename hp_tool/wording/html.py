"""Render answers as HTML tables for notebooks (`_repr_html_`). All text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape

from hp_tool.domain.parts import label
from hp_tool.domain.result import Estimate, MemoryEstimate, Reason, Recommendation, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, ServingMemory, ServingRecommendation
from hp_tool.domain.units import format_duration, format_gib
from hp_tool.wording import rankings
from hp_tool.wording.columns import (
    Column,
    configuration_columns,
    serving_columns,
    terminal_columns,
    varied_columns,
    versus_first,
)
from hp_tool.wording.fit import memory_range_words, open_settings_sentences, out_of_memory_words
from hp_tool.wording.words import cache_words, layout_arithmetic, serving_arithmetic


def estimate_html(
    estimate: Estimate | InferenceEstimate, calibrated: Estimate | None = None
) -> str:
    """Return one configuration as HTML: whether it fits in memory, and its time and memory by part.

    If `calibrated` is set, its metrics are shown instead.
    """
    if isinstance(estimate, InferenceEstimate):
        return _serving_html(estimate)
    preferred, parts = calibrated or estimate, []
    if preferred.parallel is not None:
        parts.append(_line_html(layout_arithmetic(preferred.parallel)))
    parts += _reasons_html(preferred.reasons)
    if preferred.time is not None:
        parts.append(_columns_html(terminal_columns(rankings.TRAINING_FIGURES, [preferred])))
        if preferred.fit is not None:
            parts.append(
                _line_html(
                    f"{preferred.fit}: {out_of_memory_words(preferred)}; "
                    f"{memory_range_words(preferred)}"
                )
            )
        parts += map(_line_html, open_settings_sentences(preferred))
        step = preferred.time.step_s
        shares = [
            (label(name), format_duration(s), f"{s / step:.1%}")
            for name, s in preferred.time.parts_s.items()
            if s > 0.0
        ]
        parts.append(_table_html(("time", "exposed", "share"), shares))
    if calibrated is not None and estimate.time is not None:
        without = format_duration(estimate.time.step_s)
        parts.append(_line_html(f"Calibrated on this cluster; {without} per step without."))
    if preferred.memory is not None:
        parts.append(_memory_html(preferred.memory))
    return "".join(parts)


def _serving_html(estimate: InferenceEstimate) -> str:
    parts = []
    if estimate.parallel is not None:
        parts.append(_line_html(serving_arithmetic(estimate.parallel, replicas=estimate.replicas)))
    parts += _reasons_html(estimate.reasons)
    if estimate.ttft_s is not None:
        parts.append(_columns_html(terminal_columns(rankings.SERVING_FIGURES, [estimate])))
    if estimate.kv_cache is not None:
        parts.append(_line_html(cache_words(estimate.kv_cache)))
    if estimate.memory is not None:
        parts.append(_memory_html(estimate.memory))
    return "".join(parts)


def recommendations_html(
    rows: Sequence[Recommendation] | Sequence[ServingRecommendation],
    *,
    space: SpaceSummary,
    misses: Sequence[Recommendation] | Sequence[ServingRecommendation],
) -> str:
    """Return the ranked configurations, or the nearest misses, as HTML."""
    if rows:
        body = _ranked_html(rows)
    else:
        nearest = "".join(
            _line_html(f"nearest: {_layout_html(miss)}")
            + "".join(_reasons_html(miss.estimate.reasons))
            for miss in misses
        )
        body = _line_html("no configuration fits and meets the constraints") + nearest
    return body + _line_html(
        f"{space.feasible:,} of {space.legal:,} legal configurations fit and meet the constraints"
    )


def _ranked_html(rows: Sequence[Recommendation] | Sequence[ServingRecommendation]) -> str:
    ranks = terminal_columns([rankings.RANK], rows)
    serving = [row for row in rows if isinstance(row, ServingRecommendation)]
    if serving:
        figures = terminal_columns(rankings.SERVING_FIGURES, serving)
        return _columns_html([*ranks, *serving_columns(serving), *figures])
    training = [row for row in rows if isinstance(row, Recommendation)]
    layouts = [
        *configuration_columns([row.parallel for row in training]),
        *varied_columns(training),
    ]
    figures = terminal_columns([*rankings.TRAINING_FIGURES, rankings.RISK], training)
    return _columns_html([*ranks, *layouts, *figures, *versus_first(training)])


def _layout_html(row: Recommendation | ServingRecommendation) -> str:
    if isinstance(row, ServingRecommendation):
        return serving_arithmetic(row.parallel, replicas=row.estimate.replicas)
    return layout_arithmetic(row.parallel)


def _columns_html(columns: Sequence[Column]) -> str:
    return _table_html(
        [column.title for column in columns],
        zip(*(column.cells for column in columns), strict=True),
    )


def _memory_html(memory: MemoryEstimate | ServingMemory) -> str:
    rows = [(name, format_gib(size)) for name, size in memory.parts_bytes.items()]
    return _table_html(
        ("memory", f"{format_gib(memory.total_bytes)} of {format_gib(memory.capacity_bytes)}"), rows
    )


def _reasons_html(reasons: Sequence[Reason]) -> list[str]:
    return (
        [_line_html("; ".join(f"{reason.code}: {reason.message}" for reason in reasons))]
        if reasons
        else []
    )


def _line_html(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table_html(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
