"""/compare: configurations side by side. /searches/ID/compare: those of runs, measured beside predicted; .../runs/ID: one."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Query as QueryParameter
from pydantic import Field

from hp_tool.configuration import NO_PART, Configuration
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError, InputError
from hp_tool.problem import problem_of
from hp_tool.queries import schema
from hp_tool.queries.registered import Find
from hp_tool.render import figures
from hp_tool.render.figures import LESS_IS_BETTER, Unit
from hp_tool.render.words import LABELS
from hp_tool.training.calibrated import Calibrations
from hp_tool.training.evaluate import resolve_configuration
from hp_tool.training.ratio import Known, step_ratio
from service.api.bodies import read_query
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.api.search_results import known_estimates
from service.dashboard import formats
from service.dashboard.configuration import (
    ConfigurationPage,
    ConfigurationView,
    QueryText,
    configuration_context,
    configuration_view,
)
from service.dashboard.figures import BarSpec, Stack, stack
from service.dashboard.metrics import Metric, measured_metrics
from service.dashboard.page import MAX_QUERY, ErrorFields, Page, Tone, address, error_status, page_at
from service.dashboard.trials import TONES

EQUAL = 1e-3
"""Relative changes below this count as equal."""

NAMES = ("First", "Second", "Third", "Fourth", "Fifth", "Sixth")
"""Names of the compared configurations; no more are compared."""
More = Annotated[
    tuple[Annotated[str, Field(max_length=MAX_QUERY)], ...],
    QueryParameter(max_length=len(NAMES) - 2, description="Further ones"),
]

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which the configurations differ."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One figure of every configuration."""

    name: str
    unit: Unit
    values: tuple[float | None, ...]
    changes: tuple[float | None, ...]
    """By value: itself / the first - 1; None for the first."""
    best: int | None
    """Index of the best value; None where they are equal, or one configuration cannot run."""
    measured: bool = False
    """Measured; the row above it, of the same name, is predicted."""
    repeats: bool = False
    """Its changes are those of the first row, or their inverse."""


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
    """Configurations side by side. If one cannot be answered, there are no `views` and `error` says why."""

    views: tuple[ConfigurationView, ...] = ()
    names: tuple[str, ...] = ()
    """Names of the views."""
    runs: tuple[ComparedRun, ...] = ()
    """A run of each configuration, if runs of a search are compared."""
    search_href: str | None = None
    verdict: str = ""
    """Which is faster, by how much, and which does not fit."""
    differences: tuple[Difference, ...] = ()
    rows: tuple[MetricRow, ...] = ()
    memory: Stack | None = None
    """The fullest stage of each."""
    time: Stack | None = None
    error: ErrorFields | None = None


@page_at(router, "/compare", template="compare.html", section="Ask", status=error_status)
def compare_context(
    first: QueryText, calibrations: CalibrationsDep, find: FindDep, second: QueryText | None = None, more: More = ()
) -> ComparePage:
    """Configurations side by side, as shown on their page. Without `second`: one and the one to try of the same query."""
    json_href = address("/compare.json", {"first": first, "second": second, "more": more})
    texts = (first, *(() if second is None else (second,)), *more)
    return _compared(texts, json_href=json_href, calibrations=calibrations, find=find)


@page_at(router, "/searches/{search_id}/compare", template="compare.html", section="Searches", status=error_status)
def compare_runs_context(
    search_id: str, a: str, b: str, store: StoreDep, calibrations: CalibrationsDep, find: FindDep, more: More = ()
) -> ComparePage:
    """Runs of a search, as shown on their page. A run that the caller may not see is not found."""
    record = store.get_search(search_id=search_id)
    query, known = record.query, known_estimates(record)
    runs = [store.get_run(search_id=search_id, run_id=run_id) for run_id in (a, b, *more)]
    return _compared(
        (Configuration.of(run, query=schema.parse_query(query)).text() for run in runs),
        json_href=address(f"/searches/{search_id}/compare.json", {"a": a, "b": b, "more": more}),
        calibrations=calibrations,
        find=find,
        runs=tuple(map(_compared_run, runs)),
        known=[known.get(run.parallel) for run in runs],
        search_href=f"/searches/{search_id}",
    )


@page_at(router, "/searches/{search_id}/runs/{run_id}", template="configuration.html", section="Searches", status=error_status)
def run_context(
    search_id: str, run_id: str, calibrations: CalibrationsDep, find: FindDep, store: StoreDep
) -> ConfigurationPage:
    """The configuration of a search's run, as shown on its page: a short address of it."""
    record, run = store.get_search(search_id=search_id), store.get_run(search_id=search_id, run_id=run_id)
    try:
        text = Configuration.of(run, query=schema.parse_query(record.query)).text()
    except HpToolError as error:  # a query of another version
        json_href = f"/searches/{search_id}/runs/{run_id}.json"
        return ConfigurationPage(title="A configuration", json_href=json_href, error=error.as_dict())
    page = configuration_context(text, calibrations, find, store, search=search_id)
    return replace(page, json_href=f"/searches/{search_id}/runs/{run_id}.json")


def _compared(
    texts: Iterable[str],
    *,
    json_href: str,
    calibrations: Calibrations | None,
    find: Find,
    runs: tuple[ComparedRun, ...] = (),
    known: Sequence[Estimate | InferenceEstimate | None] = (),
    search_href: str | None = None,
) -> ComparePage:
    """The page that compares the configurations of these queries; `runs`: a measured run of each; `known`: what their search
    knows of them, in place of what the newest calibration says."""
    try:
        queries = [read_query(text.encode(), find=find) for text in texts]
        if len(queries) == 1:
            queries.append(_to_try(queries[0], calibrations))
        if len({query.kind for query in queries}) > 1:
            raise InputError("a training and a serving configuration cannot be compared", field="second")
        answers = [
            configuration_view(query, calibrations=calibrations, with_fixes=False, known=estimate)
            for query, estimate in zip_longest(queries, known)
        ]
    except HpToolError as error:  # also of a search's query of another version
        return ComparePage(title="Configurations compared", json_href=json_href, error=error.as_dict())
    views = tuple(view for view, _ in answers)
    names = tuple(f"Run {run.number + 1}" for run in runs) or NAMES[: len(views)]
    return ComparePage(
        title=" and ".join(view.heading for view in views),
        json_href=json_href,
        views=views,
        names=names,
        runs=runs,
        search_href=search_href,
        verdict=_verdict(names, views, _ratios(queries, [estimate for _, estimate in answers], known, calibrations)),
        differences=_differences(queries, [estimate for _, estimate in answers]),
        rows=_rows(views, runs),
        memory=_fullest_stages(names, views),
        time=_times(names, views),
    )


Ratio = tuple[float, tuple[float, float]]


def _ratios(
    queries: Sequence[Query],
    estimates: Sequence[Estimate | InferenceEstimate],
    known: Sequence[Estimate | InferenceEstimate | None],
    calibrations: Calibrations | None,
) -> list[Ratio | None]:
    """How many times as long each but the first takes as the first; of serving, per output token and GPU."""
    sides: list[Known] = []
    for query, estimate, of_search in zip_longest(queries, estimates, known):
        if isinstance(estimate, InferenceEstimate):
            return [_serving_ratio(estimates[0], each) for each in estimates[1:]]
        configuration = resolve_configuration(query)
        best = of_search if isinstance(of_search, Estimate) else configuration.calibrated_estimate(calibrations)
        sides.append((configuration.problem, best or estimate))
    return [step_ratio(sides[0], side) for side in sides[1:]]


def _serving_ratio(first: Estimate | InferenceEstimate, second: Estimate | InferenceEstimate) -> Ratio | None:
    one, other = figures.OUTPUT.value(first), figures.OUTPUT.value(second)
    (low, high), (other_low, other_high) = (figures.OUTPUT.own_interval(each) or (0.0, 0.0) for each in (first, second))
    if not one or not other or not low or not other_low:
        return None
    spread = math.exp(math.hypot(math.log(high / low), math.log(other_high / other_low)) / 2.0)
    return one / other, (one / other / spread, one / other * spread)


def _verdict(names: Sequence[str], views: Sequence[ConfigurationView], ratios: Sequence[Ratio | None]) -> str:
    """Such as: Second is 17 % slower than First, 9 to 25 %; but First does not fit."""
    parts = [
        f"{name} is {_slower(ratio, names[0])}" for name, ratio in zip(names[1:], ratios, strict=True) if ratio is not None
    ]
    unfit = [f"{name} {view.verdict}" for name, view in zip(names, views, strict=True) if not view.feasible]
    text = "; ".join(parts)
    if unfit:
        text += f"{'; but ' if text else ''}{' and '.join(unfit)}"
    return f"{text}." if text else ""


def _slower(ratio: Ratio, first: str) -> str:
    """`17 % slower than First, 9 to 25 %`; where the interval holds no difference, both its ends say which way they are."""
    factor, (low, high) = ratio
    if low < 1.0 < high:
        return f"about as fast as {first}: from {_percent(low)} faster to {_percent(high)} slower"
    ends = sorted(abs(end - 1.0) for end in (low, high))
    word = "slower" if factor > 1.0 else "faster"
    return f"{_percent(factor)} {word} than {first}, {100 * ends[0]:.0f} to {100 * ends[1]:.0f} %"


def _percent(factor: float) -> str:
    return f"{100 * abs(factor - 1.0):.0f} %"


def _to_try(query: Query, calibrations: Calibrations | None) -> Query:
    """The query with the configuration that ranks first if all are allowed; itself if none is feasible."""
    free = replace(query, parallel=type(query.parallel)())
    best = problem_of(free).rank(top=1, calibrations=calibrations).recommendations
    return Configuration.of(best[0], query=free).query if best else query


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


def _differences(queries: Sequence[Query], estimates: Sequence[Estimate | InferenceEstimate]) -> tuple[Difference, ...]:
    """Fields of the configurations, then of the rest of the queries."""
    configs = [
        {LABELS.get(name, name.replace("_", " ")): getattr(config, name) for name in config.__slots__}
        for config in (estimate.parallel for estimate in estimates)
        if config is not None
    ]
    differences = _differing(configs) if len(configs) == len(queries) else []
    mappings = [schema.query_mapping(query) for query in queries]
    rest = [formats.dotted({k: v for k, v in mapping.items() if k not in ("parallel", *NO_PART)}) for mapping in mappings]
    return (*differences, *sorted(_differing(rest), key=lambda difference: difference.name))


def _differing(all_fields: Sequence[dict[str, Any]]) -> list[Difference]:
    """Fields that are not the same in all."""
    rows = {
        name: tuple(_text(fields.get(name)) for fields in all_fields)
        for name in dict.fromkeys(name for fields in all_fields for name in fields)
    }
    return [Difference(name=name, values=values) for name, values in rows.items() if len(set(values)) > 1]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return formats.ABSENT if value is None else str(value)


def _rows(views: Sequence[ConfigurationView], runs: Sequence[ComparedRun]) -> tuple[MetricRow, ...]:
    """Each predicted figure, followed by the measured one if there is one."""
    predicted = [{metric.name: metric for metric in view.metrics} for view in views]
    measured = [{metric.name: metric for metric in run.metrics} for run in runs]
    all_fit = all(view.feasible for view in views)
    # No prediction of a configuration that cannot run is better than the others'.
    rows = [
        _row(name, [metrics.get(name) for metrics in each], judged=all_fit or is_measured, measured=is_measured)
        for name in dict.fromkeys(name for metrics in (*predicted, *measured) for name in metrics)
        for is_measured, each in ((False, predicted), (True, measured))
        if any(name in metrics for metrics in each)
    ]
    return tuple(
        replace(row, repeats=place > 0 and not row.measured and _repeats(row, rows[0])) for place, row in enumerate(rows)
    )


def _repeats(row: MetricRow, first: MetricRow) -> bool:
    """Whether a row's changes follow from the first row's; tokens per second stay, as what people look for."""
    pairs = [
        (one, other) for one, other in zip(row.changes, first.changes, strict=True) if one is not None and other is not None
    ]
    same = all(abs(one - other) < EQUAL for one, other in pairs)
    inverse = all(abs((1.0 + one) * (1.0 + other) - 1.0) < EQUAL for one, other in pairs)
    return bool(pairs) and (same or inverse) and "okens/s" not in row.name


def _row(name: str, metrics: Sequence[Metric | None], *, judged: bool, measured: bool) -> MetricRow:
    values = tuple(metric.value if metric else None for metric in metrics)
    unit = next(metric.unit for metric in metrics if metric)
    changes = tuple(
        value / values[0] - 1.0 if place and values[0] and value is not None else None for place, value in enumerate(values)
    )
    return MetricRow(
        name=name, unit=unit, values=values, changes=changes, best=_best(values, unit) if judged else None, measured=measured
    )


def _best(values: Sequence[float | None], unit: Unit) -> int | None:
    known = [value for value in values if value is not None]
    least, most = min(known), max(known)
    if most - least <= EQUAL * abs(least):
        return None
    return values.index(least if unit in LESS_IS_BETTER else most)


def _fullest_stages(names: Sequence[str], views: Sequence[ConfigurationView]) -> Stack | None:
    rows = []
    for name, view in zip(names, views, strict=True):
        if view.memory is not None:
            bar = max(view.memory.bars, key=lambda bar: bar.total)
            rows.append(
                BarSpec(label=name, note=bar.label.lower(), parts=bar.values, limit=view.memory.limit, interval=bar.interval)
            )
    return stack(rows, unit="bytes") if rows else None


def _times(names: Sequence[str], views: Sequence[ConfigurationView]) -> Stack | None:
    """Calibrated where the cluster was measured: then that bar is the first."""
    bars = [(name, view.time.bars[0]) for name, view in zip(names, views, strict=True) if view.time is not None]
    rows = [BarSpec(label=name, parts=bar.values, interval=bar.interval) for name, bar in bars]
    return stack(rows, unit="seconds") if rows else None
