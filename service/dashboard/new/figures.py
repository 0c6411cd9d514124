"""Candidates as pictures, in Plotly's words: throughput against what it costs. `--name` is a colour of tokens.css."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_tool.domain.query import Targets
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.render.words import serving_arithmetic
from hp_tool.units import GIB
from service.dashboard.formats import arithmetic, details

Figure = dict[str, Any]


def training_figure(rows: Sequence[Recommendation], *, front: Sequence[Recommendation]) -> Figure:
    """Throughput against memory, with the front that nothing beats in both, and the device's limit."""
    best = min(rows, key=lambda row: row.rank)
    joined = sorted((_point(row) for row in front), key=lambda point: point[0])
    limit = max((e.memory.capacity_bytes for e in map(_known, rows) if e.memory), default=0.0) / GIB
    return {
        "data": [
            _points("Candidates", rows, {"color": "--series-1", "size": 6, "opacity": 0.6}),
            {
                "type": "scatter",
                "mode": "lines",
                "name": "Pareto front",
                "hoverinfo": "skip",
                "x": [x for x, _ in joined],
                "y": [y for _, y in joined],
                "line": {"color": "--series-3", "width": 2},
            },
            _points("Recommended", [best], {"symbol": "star", "color": "--good", "size": 15}),
        ],
        "layout": {
            "xaxis": {"title": "Memory per GPU, GiB"},
            "yaxis": {"title": "Tokens/s per GPU"},
            "shapes": [_line(limit)] if limit else [],
        },
    }


def serving_figure(rows: Sequence[ServingRecommendation], *, targets: Targets | None) -> Figure:
    """Throughput against both latencies; what meets a target lies in its shaded region."""
    rate = [row.estimate.output_tokens_per_second_per_gpu for row in rows]
    text = [serving_arithmetic(row.parallel, replicas=row.estimate.replicas) for row in rows]
    data, shapes = [], []
    for axis, name, latencies, most in (
        ("", "TTFT", [row.estimate.ttft_s for row in rows], targets.ttft_s if targets else None),
        ("2", "TPOT", [row.estimate.tpot_s for row in rows], targets.tpot_s if targets else None),
    ):
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": latencies,
                "y": rate,
                "text": text,
                "xaxis": f"x{axis}",
                "yaxis": f"y{axis}",
                "marker": {"color": "--series-1", "size": 7},
                "hovertemplate": f"%{{text}}<br>{name} %{{x:.3g}} s<br>%{{y:,.0f}} tokens/s per GPU<extra></extra>",
            }
        )
        if most is not None:
            box = {"x0": 0, "x1": most, "y0": 0, "y1": 1, "yref": f"y{axis} domain", "xref": f"x{axis}"}
            shapes.append(
                {"type": "rect", "fillcolor": "--good", "opacity": 0.12, "line": {"width": 0}, "layer": "below", **box}
            )
    return {
        "data": data,
        "layout": {
            "showlegend": False,
            "xaxis": {"title": "TTFT, s", "domain": [0, 0.46], "rangemode": "tozero"},
            "xaxis2": {"title": "TPOT, s", "domain": [0.54, 1], "rangemode": "tozero"},
            "yaxis": {"title": "Output tokens/s per GPU"},
            "yaxis2": {"anchor": "x2", "matches": "y", "showticklabels": False},
            "shapes": shapes,
        },
    }


def _points(name: str, rows: Sequence[Recommendation], marker: dict[str, Any]) -> Figure:
    points = [_point(row) for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "marker": marker,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "text": [f"{arithmetic(row.parallel)}<br>{details(row.parallel)}" for row in rows],
        "hovertemplate": "%{text}<br>%{x:.1f} GiB<br>%{y:,.0f} tokens/s per GPU<extra></extra>",
    }


def _point(row: Recommendation) -> tuple[float, float]:
    known = _known(row)
    return (known.memory.total_bytes / GIB if known.memory else 0.0, known.tokens_per_second_per_gpu or 0.0)


def _known(row: Recommendation) -> Estimate:
    return row.calibrated_estimate or row.estimate


def _line(x: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "--bad", "dash": "dash", "width": 1},
    }
