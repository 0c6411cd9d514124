"""Scatter plots as Plotly's JSON, which plot.js draws. Strings that begin with -- are colours of tokens.css."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Trace = dict[str, Any]
Figure = dict[str, Any]


def markers(
    name: str, *, x: Iterable[object], y: Iterable[object], text: Iterable[str], hover: str, marker: Mapping[str, object]
) -> Trace:
    """Points. `hover`: Plotly's template of what each shows; `marker`: colour, size and symbol."""
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": list(x), "y": list(y), "text": list(text),
        "marker": dict(marker), "hovertemplate": f"%{{text}}<br>{hover}<extra></extra>",
    }  # fmt: skip


def line(name: str, *, x: Iterable[object], y: Iterable[object], style: Mapping[str, object]) -> Trace:
    """A line without hover text; `style`: colour, width and dash."""
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": dict(style), "hoverinfo": "skip",
    }  # fmt: skip
