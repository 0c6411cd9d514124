"""Two configurations side by side: where they differ, and what that does."""

from __future__ import annotations

import json
from typing import Any, Literal

from hp_tool.correction import Corrections
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import InputError
from hp_tool.mends.words import LABELS
from service.dashboard.configuration.building import configuration_view
from service.dashboard.configuration.contexts import ComparePage, ConfigurationView, Difference, MetricPair
from service.dashboard.configuration.metrics import LESS_IS_BETTER
from service.dashboard.figures import Row, Stack, stack
from service.dashboard.links import compare_href, configuration_text

EQUAL = 1e-3
"""A change below it makes neither better."""


def compare_page(first: Query, second: Query, *, corrections: Corrections) -> ComparePage:
    """The page of two queries' configurations. Raises HpToolError."""
    if first.kind != second.kind:
        raise InputError("a training and a serving configuration cannot be compared", field="second")
    (one, one_found), (two, two_found) = (
        configuration_view(query, corrections=corrections, with_mends=False) for query in (first, second)
    )
    texts = configuration_text(first), configuration_text(second)
    return ComparePage(
        title=f"{one.heading} and {two.heading}",
        json_href=compare_href(*texts).replace("/compare?", "/compare.json?"),
        views=(one, two),
        differences=_differences(texts, one_found, two_found),
        pairs=_pairs(one, two),
        memory=_fullest(one, two),
        time=_beside(one, two),
        error=None,
    )


def _differences(
    texts: tuple[str, str], first: Estimate | InferenceEstimate, second: Estimate | InferenceEstimate
) -> tuple[Difference, ...]:
    """Fields of the configurations, then of what else the queries say."""
    rows = []
    if first.parallel is not None and second.parallel is not None:
        for name in first.parallel.__slots__:
            one, two = getattr(first.parallel, name), getattr(second.parallel, name, None)
            if one != two:
                rows.append(Difference(name=LABELS.get(name, name.replace("_", " ")), first=_said(one), second=_said(two)))
    flat = [_flat({name: value for name, value in json.loads(text).items() if name != "parallel"}) for text in texts]
    for name in sorted(flat[0].keys() | flat[1].keys()):
        one, two = flat[0].get(name), flat[1].get(name)
        if one != two:
            rows.append(Difference(name=name, first=_said(one), second=_said(two)))
    return tuple(rows)


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{prefix}{name}.") if isinstance(inner, dict) else {prefix + name: inner}
    return found


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "–" if value is None else str(value)


def _pairs(first: ConfigurationView, second: ConfigurationView) -> tuple[MetricPair, ...]:
    others = {metric.name: metric for metric in second.metrics}
    names = [metric.name for metric in first.metrics] or list(others)
    both_fit = first.feasible and second.feasible
    mine = {metric.name: metric for metric in first.metrics}
    rows = []
    for name in names:
        known = mine.get(name) or others[name]
        one, two = (found[name].value if name in found else None for found in (mine, others))
        change = two / one - 1.0 if one and two is not None else None
        # What cannot run is better at nothing.
        better = _better(change, known.unit) if both_fit else ""
        rows.append(MetricPair(name=name, unit=known.unit, first=one, second=two, change=change, better=better))
    return tuple(rows)


def _better(change: float | None, unit: str) -> Literal["first", "second", ""]:
    if change is None or abs(change) < EQUAL:
        return ""
    return "second" if (change < 0) == (unit in LESS_IS_BETTER) else "first"


def _fullest(first: ConfigurationView, second: ConfigurationView) -> Stack | None:
    """The stage nearest to its capacity of each, or furthest above it."""
    rows = []
    for label, view in (("First", first), ("Second", second)):
        if view.memory is not None:
            bar = max(view.memory.bars, key=lambda bar: bar.total)
            parts = {part.name: part.value for part in bar.parts}
            rows.append(Row(label=label, note=bar.label.lower(), parts=parts, limit=view.memory.limit))
    return stack(rows, unit="bytes") if rows else None


def _beside(first: ConfigurationView, second: ConfigurationView) -> Stack | None:
    rows = [
        Row(label=label, parts={part.name: part.value for part in view.time.bars[-1].parts})
        for label, view in (("First", first), ("Second", second))
        if view.time is not None
    ]
    return stack(rows, unit="seconds") if rows else None
