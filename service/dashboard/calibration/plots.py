"""Figures of a calibration for plot.js, in Plotly's words; strings that begin with -- are colours of tokens.css."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from service.dashboard.calibration.contexts import LessonRow, VersionRow

Figure = dict[str, Any]


def agreement(rows: Sequence[LessonRow]) -> Figure:
    """Predicted against measured with the identity line, both axes logarithmic."""
    seconds = [value for row in rows for value in (row.measured_s, row.before_s, row.after_s)]
    ends = [min(seconds, default=0.1) / 1.1, max(seconds, default=1.0) * 1.1]
    names = [_name(row) for row in rows]
    return {
        "data": [
            {
                "type": "scatter", "mode": "lines", "x": ends, "y": ends, "name": "predicted = measured",
                "line": {"color": "--ink-soft", "dash": "dot", "width": 1}, "hoverinfo": "skip",
            },
            _points(rows, "cost model", [row.before_s for row in rows], names, colour="--series-8", symbol="circle-open"),
            _points(rows, "after calibration", [row.after_s for row in rows], names, colour="--series-1", symbol="circle"),
        ],
        "layout": {
            "xaxis": {"title": "Measured step, s", "type": "log"},
            "yaxis": {"title": "Predicted step, s", "type": "log"},
        },
    }  # fmt: skip


def drift(rows: Sequence[LessonRow]) -> Figure:
    """Errors over the time of the measurement: a cluster that changes shows here first. Outliers stand out."""
    moments = [row.created_at.isoformat() for row in rows]
    names = [_name(row) for row in rows]
    before, after = [row.error_before for row in rows], [row.error_after for row in rows]
    outliers = [row for row in rows if row.outlier]
    return {
        "data": [
            _errors("cost model", moments, before, names, colour="--series-8", symbol="circle-open"),
            _errors("after calibration", moments, after, names, colour="--series-1", symbol="circle"),
            _errors(
                "outliers", [row.created_at.isoformat() for row in outliers], [row.error_after for row in outliers],
                [_name(row) for row in outliers], colour="--bad", symbol="x-thin-open",
            ),
        ],
        "layout": {
            "xaxis": {"title": "Measured at (UTC)", "nticks": 4, "tickangle": 0},
            "yaxis": {"title": "Predicted / measured − 1", "tickformat": "+.0%", "zeroline": True},
        },
    }  # fmt: skip


def versions_plot(versions: Sequence[VersionRow]) -> Figure:
    """Median errors of each version, oldest first."""
    ordered = [version for version in reversed(versions) if version.error_before is not None]
    numbers = [version.version for version in ordered]
    return {
        "data": [
            {
                "type": "scatter", "mode": "lines+markers", "name": name, "x": numbers, "y": values, "line": {"color": colour},
                "hovertemplate": "version %{x}: %{y:.1%}<extra></extra>",
            }
            for name, values, colour in (
                ("cost model", [version.error_before for version in ordered], "--series-8"),
                ("after calibration, on runs not fitted on", [version.error_after for version in ordered], "--series-1"),
            )
        ],
        "layout": {
            "xaxis": {"title": "Version", "dtick": max(1, len(ordered) // 10)},
            "yaxis": {"title": "Median |error|", "tickformat": ".0%", "rangemode": "tozero"},
        },
    }  # fmt: skip


def _name(row: LessonRow) -> str:
    """What hovering shows. Plotly reads some markup, so what users wrote is escaped."""
    return f"{escape(row.model)}<br>{row.arithmetic}"


def _points(
    rows: Sequence[LessonRow], name: str, values: list[float], names: list[str], *, colour: str, symbol: str
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [row.measured_s for row in rows], "y": values, "text": names,
        "marker": {"color": colour, "symbol": symbol, "size": 8},
        "hovertemplate": "%{text}<br>measured %{x:.3g} s, predicted %{y:.3g} s<extra></extra>",
    }  # fmt: skip


def _errors(
    name: str, moments: list[str], values: list[float], names: list[str], *, colour: str, symbol: str
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": moments, "y": values, "text": names,
        "marker": {"color": colour, "symbol": symbol, "size": 8 if symbol != "x-thin-open" else 14, "line": {"width": 2}},
        "hovertemplate": "%{text}<br>%{y:+.1%}<extra></extra>",
    }  # fmt: skip
