"""Chart data: stacked bars for figures.html, and points and lines that plot.js draws as SVG."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from service.api.views import View

MARGIN = 1.04
"""Length of the axis, relative to its longest bar."""
MAX_INTERVAL_RATIO = 2.0
"""Maximum end of a drawn interval, relative to the longest bar."""
MIN_SHARE = 0.002
"""Minimum fraction of the axis from which a part is drawn."""

Unit = Literal["bytes", "seconds"]
Trace = dict[str, Any]
Figure = dict[str, Any]
"""A plot in the format of plot.js. Its colours are CSS custom properties in tokens.css."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a stacked bar."""

    name: str
    value: float
    start: float
    """Start position on the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar(View):
    """A labelled bar of stacked parts."""

    label: str
    note: str
    """Small text next to the label."""
    parts: tuple[Part, ...]
    total: float
    over: bool
    """Whether the bar exceeds the limit."""
    interval: tuple[float, float] | None = None
    """Prediction interval, drawn as an error bar."""
    href: str | None = None

    @property
    def values(self) -> dict[str, float]:
        """Sizes of the parts, by name."""
        return {part.name: part.value for part in self.parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Bars on one axis from 0 to `scale`, with a line at `limit`."""

    unit: Unit
    names: tuple[str, ...]
    """Names of the drawn parts, in the order of the legend."""
    bars: tuple[Bar, ...]
    limit: float | None
    scale: float
    ticks: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSpec:
    """Label, parts and limit of a bar."""

    label: str
    parts: Mapping[str, float]
    note: str = ""
    limit: float | None = None
    interval: tuple[float, float] | None = None
    """Prediction interval of the bar's total."""
    href: str | None = None


def stack(rows: Sequence[BarSpec], *, unit: Unit) -> Stack:
    """Return bars on one axis.

    Each bar is compared with its own limit; the line shows the smallest limit.
    """
    totals = [sum(row.parts.values()) for row in rows]
    limits = [row.limit for row in rows if row.limit is not None]
    drawn_end = MAX_INTERVAL_RATIO * max([*totals, *limits], default=0.0)
    highs = [min(row.interval[1], drawn_end) for row in rows if row.interval is not None]
    longest = max([*totals, *limits, *highs], default=0.0)
    scale = MARGIN * longest or 1.0
    drawn = {
        name for row in rows for name, value in row.parts.items() if value >= MIN_SHARE * scale
    }
    return Stack(
        unit=unit,
        names=tuple(
            name
            for name in dict.fromkeys(name for row in rows for name in row.parts)
            if name in drawn
        ),
        bars=tuple(
            Bar.of(
                row,
                parts=tuple(_stacked(row.parts)),
                total=total,
                over=row.limit is not None and total > row.limit,
            )
            for row, total in zip(rows, totals, strict=True)
        ),
        limit=min(limits, default=None),
        scale=scale,
        ticks=_ticks(scale, step_unit=2.0**30 if unit == "bytes" else 1.0),
    )


def _stacked(parts: Mapping[str, float]) -> Iterator[Part]:
    start = 0.0
    for name, value in parts.items():
        if value > 0.0:
            yield Part(name=name, value=value, start=start)
        start += value


def _ticks(scale: float, *, step_unit: float) -> tuple[float, ...]:
    """Return four to eight round values, starting at zero."""
    length = scale / step_unit
    step = 1e-9
    while length / step > 8.0:
        for factor in (2.0, 2.5, 2.0):
            step *= factor
            if length / step <= 8.0:
                break
    return tuple(k * step * step_unit for k in range(int(length / step) + 1))


def markers(
    name: str,
    *,
    x: Iterable[object],
    y: Iterable[object],
    text: Iterable[str],
    marker: Mapping[str, object],
) -> Trace:
    """Return points.

    `text` is the text of each point, possibly with line breaks. `marker` sets colour, size and
    symbol.
    """
    return {
        "mode": "points",
        "name": name,
        "x": list(x),
        "y": list(y),
        "text": list(text),
        **marker,
    }


def line(
    name: str, *, x: Iterable[object], y: Iterable[object], style: Mapping[str, object]
) -> Trace:
    """Return a line. `style` sets colour, width and dash."""
    return {"mode": "lines", "name": name, "x": list(x), "y": list(y), **style}
