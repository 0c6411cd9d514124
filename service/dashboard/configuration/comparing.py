"""Two configurations side by side: where they differ, and what that does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError, InputError
from hp_tool.render.words import LABELS
from hp_tool.training.calibrated import Calibrations
from service.dashboard.configuration.building import configuration_view
from service.dashboard.configuration.contexts import ComparedRun, ComparePage, ConfigurationView, Difference, Metric, MetricPair
from service.dashboard.configuration.metrics import LESS_IS_BETTER
from service.dashboard.figures import Row, Stack, stack
from service.dashboard.links import compare_href, configuration_text

EQUAL = 1e-3
"""A change below it makes neither better."""


def compare_page(
    first: Query,
    second: Query,
    *,
    calibrations: Calibrations | None,
    runs: tuple[ComparedRun, ...] = (),
    search_href: str | None = None,
    json_href: str | None = None,
) -> ComparePage:
    """The page of two queries' configurations; `runs`, one of each, are measurements to lay beside. Raises HpToolError."""
    if first.kind != second.kind:
        raise InputError("a training and a serving configuration cannot be compared", field="second")
    (one, one_found), (two, two_found) = (
        configuration_view(query, calibrations=calibrations, with_fixes=False) for query in (first, second)
    )
    texts = configuration_text(first), configuration_text(second)
    return ComparePage(
        title=f"{one.heading} and {two.heading}",
        json_href=json_href or compare_href(*texts).replace("/compare?", "/compare.json?"),
        views=(one, two),
        runs=runs,
        search_href=search_href,
        differences=_differences(texts, one_found, two_found),
        pairs=_pairs(one, two, runs),
        memory=_fullest(one, two),
        time=_beside(one, two),
        error=None,
    )


def failed_comparison(error: HpToolError, *, json_href: str = "/compare.json") -> ComparePage:
    """The page that says why two configurations cannot be compared."""
    return ComparePage(
        title="Two configurations",
        json_href=json_href,
        views=(),
        runs=(),
        search_href=None,
        differences=(),
        pairs=(),
        memory=None,
        time=None,
        error=error.as_dict(),
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


def _pairs(first: ConfigurationView, second: ConfigurationView, runs: Sequence[ComparedRun]) -> tuple[MetricPair, ...]:
    """Each figure as predicted, and below it as measured where it was."""
    predicted = [{metric.name: metric for metric in view.metrics} for view in (first, second)]
    measured = [{metric.name: metric for metric in run.metrics} for run in runs] or [{}, {}]
    both_fit = first.feasible and second.feasible
    rows = []
    for name in dict.fromkeys([*predicted[0], *predicted[1], *measured[0], *measured[1]]):
        for seen, (one, two) in ((False, predicted), (True, measured)):
            if name in one or name in two:
                # What cannot run is better at nothing.
                rows.append(_pair(one.get(name), two.get(name), judged=both_fit or seen, measured=seen))
    return tuple(rows)


def _pair(first: Metric | None, second: Metric | None, *, judged: bool, measured: bool) -> MetricPair:
    known = first or second
    assert known is not None
    one, two = (found.value if found else None for found in (first, second))
    change = two / one - 1.0 if one and two is not None else None
    return MetricPair(
        name=known.name,
        unit=known.unit,
        first=one,
        second=two,
        change=change,
        better=_better(change, known.unit) if judged else "",
        measured=measured,
    )


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
