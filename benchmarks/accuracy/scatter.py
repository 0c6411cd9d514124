"""A small static SVG of predicted and measured figures on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

SIDE, LEFT, TOP, BELOW, KEY = 360, 56, 34, 44, 300
COLOURS = (
    "#3366cc",
    "#dc3912",
    "#109618",
    "#990099",
    "#ff9900",
    "#0099c6",
    "#dd4477",
    "#66aa00",
    "#8b4513",
    "#316395",
    "#994499",
    "#22aa99",
    "#aaaa11",
    "#6633cc",
)
BAND = 0.1
"""Relative distance of the dashed lines from the diagonal."""


def scatter(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str) -> str:
    """Return an SVG picture of points (log10 measured, log10 predicted), with one colour for each
    series.
    """
    values = [value for points in series.values() for point in points for value in point]
    low, high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2

    def x(value: float) -> float:
        return round(LEFT + SIDE * (value - low) / (high - low), 1)

    def y(value: float) -> float:
        return round(TOP + SIDE * (high - value) / (high - low), 1)

    ticks = range(math.ceil(low), math.floor(high) + 1)
    frame = [
        f'<rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#888"/>',
        *(
            _diagonal(x, y, low, high, shift)
            for shift in (0.0, math.log10(1.0 + BAND), math.log10(1.0 - BAND))
        ),
    ]
    for tick in ticks:
        name = f"{10.0**tick:g}"
        frame += [
            f'<path d="M{x(tick)} {TOP}v{SIDE}M{LEFT} {y(tick)}h{SIDE}" stroke="#ddd"/>',
            f'<text x="{x(tick)}" y="{TOP + SIDE + 16}" text-anchor="middle">{name}</text>',
            f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{name}</text>',
        ]
    dots, key = [], []
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = "".join(f"M{x(px)} {y(py)}h0" for px, py in dict.fromkeys(points))
        dots.append(
            f'<path d="{path}" stroke="{colour}" stroke-width="4.5" stroke-linecap="round" '
            'stroke-opacity="0.6"/>'
        )
        row = TOP + 8 + 18 * index
        key += [
            f'<circle cx="{LEFT + SIDE + 18}" cy="{row}" r="4" fill="{colour}"/>',
            f'<text x="{LEFT + SIDE + 28}" y="{row + 4}">{escape(name)}</text>',
        ]
    width, height = LEFT + SIDE + KEY, TOP + SIDE + BELOW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="11" fill="#333">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="{LEFT}" y="20" font-size="13" font-weight="bold">{escape(title)}</text>',
            *frame,
            *dots,
            *key,
            f'<text x="{LEFT}" y="{TOP + SIDE + 36}">across: measured, up: predicted, dashed: '
            f"{BAND:.0%} off</text>",
            "</svg>\n",
        ]
    )


def _diagonal(
    x: Callable[[float], float], y: Callable[[float], float], low: float, high: float, shift: float
) -> str:
    """Return the line on which predicted = 10^`shift` x measured."""
    first, last = max(low, low - shift), min(high, high - shift)
    dashes = ' stroke-dasharray="4 3"' if shift else ""
    return (
        f'<path d="M{x(first)} {y(first + shift)}L{x(last)} {y(last + shift)}" '
        f'stroke="#555"{dashes}/>'
    )
