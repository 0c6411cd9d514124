"""/compare: two configurations side by side. /searches/ID/compare: those of two runs, measured beside predicted."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import APIRouter

from hp_tool import training
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError, InputError
from hp_tool.queries.registered import Find
from hp_tool.render.words import LABELS
from hp_tool.training import config_query
from hp_tool.training.calibrated import Calibrations
from service.api.bodies import read_query
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.dashboard import formats
from service.dashboard.configuration import ConfigurationView, QueryText, configuration_view
from service.dashboard.figures import BarSpec, Stack, stack
from service.dashboard.metrics import LESS_IS_BETTER, Metric, MetricUnit, measured_metrics
from service.dashboard.page import ErrorFields, Page, Tone, address, configuration_text, error_status, page_at
from service.dashboard.trials import TONES

EQUAL = 1e-3
"""Relative changes below this count as equal."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which two configurations differ."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPair:
    """One figure of both; `change` is second / first - 1."""

    name: str
    unit: MetricUnit
    first: float | None
    second: float | None
    change: float | None
    better: Literal["first", "second", ""]
    measured: bool = False
    """Measured; the row above it, of the same name, is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A profile run of one of the configurations compared."""

    number: int
    """0-based, in its search."""
    state: str
    tone: Tone
    cause: str | None
    """Why it failed."""
    reduced: bool
    """Its times are extrapolated from a reduced run."""
    metrics: tuple[Metric, ...]
    """Measured figures, under the names of the predicted ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePage(Page):
    """Two configurations side by side. If one cannot be answered, there are no `views` and `error` says why."""

    views: tuple[ConfigurationView, ...] = ()
    runs: tuple[ComparedRun, ...] = ()
    """A run of each configuration, if two runs of a search are compared."""
    search_href: str | None = None
    differences: tuple[Difference, ...] = ()
    pairs: tuple[MetricPair, ...] = ()
    memory: Stack | None = None
    """The fullest stage of each."""
    time: Stack | None = None
    error: ErrorFields | None = None


@page_at(router, "/compare", template="compare.html", section="Explorer", status=error_status)
def compare_context(
    first: QueryText, calibrations: CalibrationsDep, find: FindDep, second: QueryText | None = None
) -> ComparePage:
    """Two configurations, as shown on their page. Without `second`: a configuration and the one to try of the same query."""
    json_href = address("/compare.json", {"first": first, "second": second})
    texts = (first,) if second is None else (first, second)
    return _compared(texts, json_href=json_href, calibrations=calibrations, find=find)


@page_at(router, "/searches/{search_id}/compare", template="compare.html", section="Searches", status=error_status)
def compare_runs_context(
    search_id: str, a: str, b: str, store: StoreDep, calibrations: CalibrationsDep, find: FindDep
) -> ComparePage:
    """Two runs of a search, as shown on their page. A run that the caller may not see is not found."""
    query = store.get_search(search_id=search_id).query
    runs = [store.get_run(search_id=search_id, run_id=run_id) for run_id in (a, b)]
    return _compared(
        (configuration_text(query, parallel=run.parallel) for run in runs),
        json_href=address(f"/searches/{search_id}/compare.json", {"a": a, "b": b}),
        calibrations=calibrations,
        find=find,
        runs=tuple(map(_compared_run, runs)),
        search_href=f"/searches/{search_id}",
    )


def _compared(
    texts: Iterable[str],
    *,
    json_href: str,
    calibrations: Calibrations | None,
    find: Find,
    runs: tuple[ComparedRun, ...] = (),
    search_href: str | None = None,
) -> ComparePage:
    """The page that compares the configurations of two queries; `runs`: a measured run of each."""
    try:
        first, *rest = (read_query(text.encode(), find=find) for text in texts)
        second = rest[0] if rest else _to_try(first, calibrations)
        if first.kind != second.kind:
            raise InputError("a training and a serving configuration cannot be compared", field="second")
        (one, first_estimate), (two, second_estimate) = (
            configuration_view(query, calibrations=calibrations, with_fixes=False) for query in (first, second)
        )
    except HpToolError as error:  # also of a search's query of another version
        return ComparePage(title="Two configurations", json_href=json_href, error=error.as_dict())
    return ComparePage(
        title=f"{one.heading} and {two.heading}",
        json_href=json_href,
        views=(one, two),
        runs=runs,
        search_href=search_href,
        differences=_differences((first, second), first_estimate, second_estimate),
        pairs=_pairs(one, two, runs),
        memory=_fullest_stages(one, two),
        time=_times(one, two),
    )


def _to_try(query: Query, calibrations: Calibrations | None) -> Query:
    """The query with the configuration that ranks first if all are allowed; itself if none is feasible."""
    free = replace(query, parallel=type(query.parallel)())
    best = training.recommend(query=free, top=1, calibrations=calibrations).recommendations
    return replace(query, parallel=config_query(best[0].parallel)) if best else query


def _compared_run(run: RunRecord) -> ComparedRun:
    measurement = run.measurement
    state = measurement.status if measurement else str(run.state)
    return ComparedRun(
        number=run.number,
        state=state,
        tone=TONES.get(state, ""),
        cause=run.cause or (measurement.cause if measurement else None),
        reduced=not run.fidelity.is_whole,
        metrics=measured_metrics(run),
    )


def _differences(
    queries: tuple[Query, Query], first: Estimate | InferenceEstimate, second: Estimate | InferenceEstimate
) -> tuple[Difference, ...]:
    """Fields of the configurations, then of the rest of the queries."""
    configs = [
        {LABELS.get(name, name.replace("_", " ")): getattr(config, name) for name in config.__slots__}
        for config in (first.parallel, second.parallel)
        if config is not None
    ]
    differences = _differing(configs[0], configs[1]) if len(configs) == 2 else []
    mappings = [json.loads(configuration_text(query)) for query in queries]
    one, two = (formats.dotted({name: value for name, value in mapping.items() if name != "parallel"}) for mapping in mappings)
    return (*differences, *sorted(_differing(one, two), key=lambda difference: difference.name))


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
    return [Difference(name=name, first=_text(first.get(name)), second=_text(second.get(name))) for name in names]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return formats.ABSENT if value is None else str(value)


def _pairs(first: ConfigurationView, second: ConfigurationView, runs: Sequence[ComparedRun]) -> tuple[MetricPair, ...]:
    """Each predicted figure, followed by the measured one if there is one."""
    predicted = [{metric.name: metric for metric in view.metrics} for view in (first, second)]
    measured = [{metric.name: metric for metric in run.metrics} for run in runs] or [{}, {}]
    both_fit = first.feasible and second.feasible
    # No prediction of a configuration that cannot run is better than the other's.
    return tuple(
        _pair(one.get(name), two.get(name), judged=both_fit or is_measured, measured=is_measured)
        for name in dict.fromkeys([*predicted[0], *predicted[1], *measured[0], *measured[1]])
        for is_measured, (one, two) in ((False, predicted), (True, measured))
        if name in one or name in two
    )


def _pair(first: Metric | None, second: Metric | None, *, judged: bool, measured: bool) -> MetricPair:
    known = first or second
    assert known is not None
    one, two = (metric.value if metric else None for metric in (first, second))
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


def _fullest_stages(first: ConfigurationView, second: ConfigurationView) -> Stack | None:
    rows = []
    for label, view in (("First", first), ("Second", second)):
        if view.memory is not None:
            bar = max(view.memory.bars, key=lambda bar: bar.total)
            rows.append(BarSpec(label=label, note=bar.label.lower(), parts=bar.values, limit=view.memory.limit))
    return stack(rows, unit="bytes") if rows else None


def _times(first: ConfigurationView, second: ConfigurationView) -> Stack | None:
    labelled = (("First", first), ("Second", second))
    rows = [BarSpec(label=label, parts=view.time.bars[0].values) for label, view in labelled if view.time is not None]
    return stack(rows, unit="seconds") if rows else None
