"""Figures that the server draws: parts that stack to a whole, in rows over one axis. Numbers only; `figures.html` makes SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MARGIN = 1.04
"""The axis over its longest bar."""
LEAST_SHARE = 0.002
"""Of the axis; thinner parts are not drawn, but count."""

Unit = Literal["bytes", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a bar."""

    name: str
    value: float
    start: float
    """Where it begins on the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row: a label, what stands beside it in small, and its parts one after the other."""

    label: str
    note: str
    parts: tuple[Part, ...]
    total: float
    over: bool
    """Longer than the limit."""
    href: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Bars over one axis from 0 to `scale`, with a line at `limit`."""

    unit: Unit
    names: tuple[str, ...]
    """Parts that occur, in order: the legend."""
    bars: tuple[Bar, ...]
    limit: float | None
    scale: float
    ticks: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a bar is made from."""

    label: str
    parts: Mapping[str, float]
    note: str = ""
    limit: float | None = None
    href: str | None = None


def stack(rows: Sequence[Row], *, unit: Unit) -> Stack:
    """Rows over one axis; where they have limits of their own, the smallest is drawn, and each row is held against its own."""
    totals = [sum(row.parts.values()) for row in rows]
    limits = [row.limit for row in rows if row.limit is not None]
    longest = max([*totals, *limits], default=0.0)
    scale = MARGIN * longest or 1.0
    drawn = {name for row in rows for name, value in row.parts.items() if value >= LEAST_SHARE * scale}
    return Stack(
        unit=unit,
        names=tuple(name for name in dict.fromkeys(name for row in rows for name in row.parts) if name in drawn),
        bars=tuple(
            Bar(
                label=row.label,
                note=row.note,
                parts=tuple(_laid(row.parts.items())),
                total=total,
                over=row.limit is not None and total > row.limit,
                href=row.href,
            )
            for row, total in zip(rows, totals, strict=True)
        ),
        limit=min(limits, default=None),
        scale=scale,
        ticks=_ticks(scale, step_unit=2.0**30 if unit == "bytes" else 1.0),
    )


def _laid(parts: Iterable[tuple[str, float]]) -> Iterable[Part]:
    start = 0.0
    for name, value in parts:
        if value > 0.0:
            yield Part(name=name, value=value, start=start)
        start += value


def _ticks(scale: float, *, step_unit: float) -> tuple[float, ...]:
    """Four to eight round values from zero."""
    length = scale / step_unit
    step = 1e-9
    while length / step > 8.0:
        for factor in (2.0, 2.5, 2.0):
            step *= factor
            if length / step <= 8.0:
                break
    return tuple(k * step * step_unit for k in range(int(length / step) + 1))
