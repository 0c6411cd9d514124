"""Pages /compare, /searches/ID/compare and .../runs/ID: compare configurations and runs."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Query as QueryParameter
from pydantic import Field

from hp_tool.domain.axes import AXES_BY_KEY
from hp_tool.domain.parallel import Recompute
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord, SearchRecord
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions import schema
from hp_tool.questions.configuration import SEARCH_KEYS, Configuration
from hp_tool.questions.problem import problem_of
from hp_tool.questions.registered import Find
from hp_tool.questions.serving.ratio import output_ratio
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.ratio import Known, step_ratio
from hp_tool.wording import figures
from hp_tool.wording.figures import LESS_IS_BETTER, Unit
from hp_tool.wording.ratios import Ratio
from service.api.bodies import read_query
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.api.search_results import complete_estimates
from service.dashboard import formats, trials
from service.dashboard.configuration import (
    ConfigurationPage,
    ConfigurationView,
    QueryText,
    configuration_context,
    configuration_view,
)
from service.dashboard.figures import BarSpec, Stack, stack
from service.dashboard.live import get_log_tail, list_running
from service.dashboard.metrics import (
    ComparedRun,
    Metric,
    compared_run,
    measured_parts,
    measured_peak,
)
from service.dashboard.page import MAX_QUERY, ErrorFields, Page, address, error_status, page_at
from service.dashboard.verdict import (
    Before,
    Speed,
    compare_with_prediction,
    comparison_words,
    recommended_index,
    relative_speeds,
    stored_prediction,
)
from service.http.sample import SAMPLE

EQUAL = 1e-3
"""Relative changes below this value count as no change."""

MAX_COMPARED = 5
"""Maximum number of configurations to compare."""
MAX_VALUE_CHARS = 24
"""Maximum number of characters of a setting's value in a name."""
NUM_SEARCHES = 8
"""Number of newest searches whose runs are offered for comparison."""
More = Annotated[
    tuple[Annotated[str, Field(max_length=MAX_QUERY)], ...],
    QueryParameter(max_length=MAX_COMPARED, description="Further configurations"),
]

RUN_ADDRESS = re.compile(r"/searches/([^/]+)/runs/([^/]+)")

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which the configurations differ."""

    path: str
    """PATH as in `--set PATH=VALUE`."""
    name: str
    values: tuple[str, ...]
    """VALUE of each configuration, as in `--set PATH=VALUE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A measured run that the page offers for comparison."""

    value: str
    """URL of its page."""
    place: int
    """Position of its search; 0 is the newest."""
    search: str
    arithmetic: str
    details: str
    step_s: float | None
    """Measured seconds of a step or a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One figure of every compared configuration."""

    name: str
    unit: Unit
    values: tuple[float | None, ...]
    changes: tuple[float | None, ...]
    """Relative change of each value against the first (value / first - 1); None for the first."""
    best: int | None
    """Index of the best value; None if all are equal or one configuration cannot run."""
    measured: bool = False
    """Whether the row is measured. The predicted row of the same name precedes it."""
    repeats: bool = False
    """Whether its changes are equal to those of the first row, or to their inverse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePage(Page):
    """Configurations side by side. If one fails, there are no `views`, and `error` has the
    reason.
    """

    views: tuple[ConfigurationView, ...] = ()
    names: tuple[str, ...] = ()
    """Names of the views."""
    runs: tuple[ComparedRun | None, ...] = ()
    """The run of each configuration, None for other configurations; empty if there are no runs."""
    search_href: str | None = None
    """URL of the search that all runs belong to."""
    speeds: tuple[Speed | None, ...] = ()
    """Time of each view relative to the first; None for the first, and if unknown."""
    without: tuple[str, ...] = ()
    """For each view, the URL of the comparison without it; empty for two views."""
    choices: tuple[Choice, ...] = ()
    """Runs to choose from, if the URL names none."""
    recommended: int | None = None
    """Index of the recommended configuration; None if none can run or none is clearly faster."""
    verdict: str = ""
    """Sentence: which configuration to use, which is faster and by how much, and which does not
    fit.
    """
    range_note: str = ""
    """Explanation of the verdict's range; empty without a range."""
    predicted: str = "predicted"
    """Label for values that are not measured: `calibrated` if calibrated by the search's runs."""
    differences: tuple[Difference, ...] = ()
    rows: tuple[MetricRow, ...] = ()
    memory: Stack | None = None
    """Memory of the fullest stage of each configuration."""
    time: Stack | None = None
    error: ErrorFields | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: a query, or a run of a search."""

    query: Query
    run: RunRecord | None = None
    """The run with this configuration; None for a query."""
    known: Estimate | InferenceEstimate | None = None
    """Estimate of the run's search, used instead of the newest calibration's estimate."""


@page_at(router, "/compare", template="compare.html", section="Compare", status=error_status)
def compare_context(
    calibrations: CalibrationsDep,
    find: FindDep,
    store: StoreDep,
    first: QueryText | None = None,
    second: QueryText | None = None,
    more: More = (),
) -> ComparePage:
    """Compare configurations; each is a query, or the address of a
    search's run.

    If one is given, it is compared with the recommended configuration of the same query. If none is
    given, the page offers runs.
    """
    texts = tuple(text for text in (first, second, *more) if text)
    if not texts:
        return ComparePage(
            title="Compare", json_href="/compare.json", choices=tuple(_choices(store))
        )
    json_href = json_of(texts)
    matches = [(text, RUN_ADDRESS.fullmatch(text)) for text in texts]
    sides = [_run_of(store, *match.groups()) if match else text for text, match in matches]
    page = _compared(sides, json_href=json_href, calibrations=calibrations, find=find)
    fewer = [texts[:place] + texts[place + 1 :] for place in range(len(texts))]
    without = tuple(json_of(rest).replace(".json", "", 1) for rest in fewer if len(rest) > 1)
    return replace(page, without=without)


def json_of(texts: Sequence[str]) -> str:
    """Return the URL of the JSON of this comparison."""
    names = dict(zip(("first", "second"), texts, strict=False))
    return address("/compare.json", {**names, "more": tuple(texts[2:])})


def _choices(store: Store) -> Iterator[Choice]:
    """Yield measured runs of the newest searches, the fastest of each search first."""
    newest = store.list_searches(limit=NUM_SEARCHES).items
    for place, record in enumerate((*newest, store.get_search(search_id=SAMPLE))):
        runs = [run for run in store.run_figures(search_id=record.id) if run.objective_s]
        for run in sorted(runs, key=lambda run: run.objective_s or 0.0)[:MAX_COMPARED]:
            arithmetic, details = trials.configuration_words(run.parallel, record.query)
            yield Choice(
                value=f"/searches/{record.id}/runs/{run.id}",
                place=place,
                search=record.label.name or formats.subject(record.query),
                arithmetic=arithmetic,
                details=details,
                step_s=run.objective_s,
            )


def _run_of(store: Store, search_id: str, run_id: str) -> tuple[SearchRecord, RunRecord]:
    return store.get_search(search_id=search_id), store.get_run(search_id=search_id, run_id=run_id)


def _read_side(named: str | tuple[SearchRecord, RunRecord], *, find: Find) -> Side:
    """Parse a query, or return the query of a run in its search.

    Raises:
        HpToolError: The query is invalid or belongs to another version.
    """
    if isinstance(named, str):
        return Side(query=read_query(named.encode(), find=find))
    record, run = named
    text = Configuration.from_row(run, query=schema.parse_query(record.query)).text()
    return Side(
        query=read_query(text.encode(), find=find),
        run=run,
        known=complete_estimates(record).get(run.parallel),
    )


@page_at(
    router,
    "/searches/{search_id}/runs/{run_id}",
    template="configuration.html",
    section="Searches",
    status=error_status,
)
def run_context(
    search_id: str, run_id: str, calibrations: CalibrationsDep, find: FindDep, store: StoreDep
) -> ConfigurationPage:
    """Return a run of a search: its prediction, its measurement and its configuration."""
    record, run = (
        store.get_search(search_id=search_id),
        store.get_run(search_id=search_id, run_id=run_id),
    )
    try:
        text = Configuration.from_row(run, query=schema.parse_query(record.query)).text()
    except HpToolError as error:  # The query belongs to another version.
        json_href = f"/searches/{search_id}/runs/{run_id}.json"
        return ConfigurationPage(
            title="A configuration", json_href=json_href, error=error.as_dict()
        )
    page = configuration_context(text, calibrations, find, store, search=search_id)
    this = compared_run(run, formats.device_of(record.query))
    now = () if run.state.ended else list_running(store, record)
    expected = stored_prediction(run)
    return replace(
        page,
        run=this,
        measured=compare_with_prediction(this, run) if run.state.ended else None,
        before=expected,
        steps=_run_chart(this, expected, page.view),
        why=trials.reason_words(run.predicted.get("chosen_by")),
        running=next((each for each in now if each.id == run.id), None),
        log=get_log_tail(record, run),
        search_href=f"/searches/{search_id}",
        search_name=record.label.name or formats.subject(record.query),
        json_href=f"/searches/{search_id}/runs/{run_id}.json",
    )


def _run_chart(run: ComparedRun, expected: Before, view: ConfigurationView | None) -> Stack | None:
    """Plot the run's step time: predicted before the run, measured, and calibrated since then.

    Return None if the run has no measurement or no stored prediction.
    """
    measured, now = (
        next((metric for metric in metrics if metric.unit == "seconds"), None)
        for metrics in (run.metrics, view.metrics if view else ())
    )
    if measured is None or not measured.value or not expected.step_s:
        return None
    interval = expected.step_s_interval
    rows = [
        BarSpec(label="Predicted before", parts={"predicted": expected.step_s}, interval=interval),
        BarSpec(label="Measured", parts={"measured": measured.value}),
    ]
    if now is not None and now.value and view and view.evidence_href:
        ends = None if now.low is None or now.high is None else (now.low, now.high)
        rows.append(BarSpec(label="Predicted now", parts={"predicted": now.value}, interval=ends))
    return stack(rows, unit="seconds")


def _compared(
    named: Sequence[str | tuple[SearchRecord, RunRecord]],
    *,
    json_href: str,
    calibrations: Calibrations | None,
    find: Find,
) -> ComparePage:
    """Return the page that compares these configurations, or the page that reports an error."""
    try:
        if len(named) > MAX_COMPARED:
            raise InputError(
                f"At most {MAX_COMPARED} configurations can be compared; remove some.", field="more"
            )
        sides = [_read_side(each, find=find) for each in named]
        if len(sides) == 1:
            sides.append(Side(query=_replace_by_best(sides[0].query, calibrations)))
        if len({side.query.kind for side in sides}) > 1:
            raise InputError(
                "A training and a serving configuration cannot be compared.", field="second"
            )
        answers = [
            configuration_view(
                side.query, calibrations=calibrations, with_fixes=False, known=side.known
            )
            for side in sides
        ]
    except HpToolError as error:
        return ComparePage(
            title="Configurations compared", json_href=json_href, error=error.as_dict()
        )
    views = tuple(view for view, _ in answers)
    runs = tuple(
        compared_run(side.run, view.device) if side.run else None
        for side, view in zip(sides, views, strict=True)
    )
    searches = {side.run.search_id if side.run else None for side in sides}
    search_id = searches.pop() if len(searches) == 1 else None
    estimates = [estimate for _, estimate in answers]
    differences = _differences([side.query for side in sides], estimates)
    names = (
        tuple(f"Run {run.number + 1}" for run in runs if run)
        if search_id
        else _names(views, differences)
    )
    ratios = _ratios(sides, estimates, calibrations)
    relative = (None, *relative_speeds(runs, ratios))
    unfit = ["" if view.feasible else view.verdict for view in views]
    recommended = recommended_index(unfit, runs, relative)
    predicted = "calibrated" if any(side.run and side.known for side in sides) else "predicted"
    return ComparePage(
        title=" and ".join(names),
        json_href=json_href,
        views=views,
        names=names,
        runs=runs if any(runs) else (),
        search_href=search_id and f"/searches/{search_id}",
        speeds=relative,
        recommended=recommended,
        verdict=comparison_words(names, unfit, runs, ratios, recommended),
        range_note="" if any(runs) else _range_note(ratios, views),
        predicted=predicted,
        differences=differences,
        rows=_rows(views, runs),
        memory=_memory_chart(names, views, runs),
        time=_time_chart(names, views, sides, predicted),
    )


def _ratios(
    sides: Sequence[Side],
    estimates: Sequence[Estimate | InferenceEstimate],
    calibrations: Calibrations | None,
) -> list[Ratio | None]:
    """Return the time ratio of each configuration after the first to the first.

    For serving, the ratio is of GPU time per output token.
    """
    known: list[Known] = []
    for side, estimate in zip(sides, estimates, strict=True):
        if isinstance(estimate, InferenceEstimate):
            return [output_ratio(estimates[0], each) for each in estimates[1:]]
        configuration = resolve_configuration(side.query)
        best = (
            side.known
            if isinstance(side.known, Estimate)
            else configuration.calibrated_estimate(calibrations)
        )
        known.append((configuration.problem, best or estimate))
    return [step_ratio(known[0], each) for each in known[1:]]


def _range_note(ratios: Sequence[Ratio | None], views: Sequence[ConfigurationView]) -> str:
    """Explain what the range of a ratio covers, and why it differs from the two intervals."""
    widths = [_interval_width(view) for view in views]
    pairs = [
        (ratio[1][1] / ratio[1][0], min(widths[0], width))
        for ratio, width in zip(ratios, widths[1:], strict=True)
        if ratio is not None and width is not None and widths[0] is not None
    ]
    if not pairs:
        return ""
    if all(range_width < width for range_width, width in pairs):
        return (
            "Range of the ratio; errors that both share cancel, so it is narrower than the "
            "interval of either."
        )
    if all(range_width >= width for range_width, width in pairs):
        return "Range of the ratio; it combines the intervals of both."
    return "Range of the ratio; errors that both share cancel."


def _interval_width(view: ConfigurationView) -> float | None:
    """Return the upper bound of the compared figure's interval divided by its lower bound.

    The figure is the step time, or the output tokens for serving.
    """
    names = (figures.STEP.label, figures.OUTPUT.label.replace("GPU", view.device))
    metric = next((each for each in view.metrics if each.name in names), None)
    return metric.high / metric.low if metric and metric.low and metric.high else None


def _replace_by_best(query: Query, calibrations: Calibrations | None) -> Query:
    """Replace the query's configuration by the recommended one, if any fits."""
    free = replace(query, parallel=type(query.parallel)())
    best = problem_of(free).rank(top=1, calibrations=calibrations).recommendations
    return Configuration.from_row(best[0], query=free).query if best else query


def _names(
    views: Sequence[ConfigurationView], differences: Sequence[Difference]
) -> tuple[str, ...]:
    """Return the arithmetic of each configuration.

    If two are equal, add the first setting in which they differ.
    """
    names = tuple(view.heading.partition(" = ")[0] for view in views)
    for row in differences:
        if len(set(names)) == len(names):
            break
        longer = tuple(
            f"{name}, {row.name} {value[:MAX_VALUE_CHARS]}"
            for name, value in zip(names, row.values, strict=True)
        )
        names = longer if len(set(longer)) > len(set(names)) else names
    return names


def _differences(
    queries: Sequence[Query], estimates: Sequence[Estimate | InferenceEstimate]
) -> tuple[Difference, ...]:
    """Return the differing fields of `parallel`, then the other differing fields."""
    configs = [
        {f"parallel.{name}": getattr(config, name) for name in config.__slots__}
        for config in (estimate.parallel for estimate in estimates)
        if config is not None
    ]
    mappings = [schema.query_mapping(query) for query in queries]
    rest = [
        formats.dotted({k: v for k, v in mapping.items() if k not in ("parallel", *SEARCH_KEYS)})
        for mapping in mappings
    ]
    return (
        *(_differing(configs) if len(configs) == len(queries) else ()),
        *sorted(_differing(rest), key=lambda difference: difference.path),
    )


def _differing(all_fields: Sequence[dict[str, Any]]) -> list[Difference]:
    """Return the fields that differ between any two of the mappings."""
    rows = {
        path: tuple(_text(fields.get(path)) for fields in all_fields)
        for path in dict.fromkeys(path for fields in all_fields for path in fields)
    }
    return [
        Difference(path=path, name=_label(path), values=values)
        for path, values in rows.items()
        if len(set(values)) > 1
    ]


def _label(path: str) -> str:
    axis = AXES_BY_KEY.get(path.removeprefix("parallel."))
    return axis.head if axis else formats.field_label(path)


def _text(value: Any) -> str:
    """Format a value as in `--set PATH=VALUE`; a dash if it is not set."""
    if isinstance(value, Recompute):
        value = schema.to_dict(value)
    if value is None or isinstance(value, str):
        return formats.ABSENT if value is None else value
    return json.dumps(value)


def _rows(
    views: Sequence[ConfigurationView], runs: Sequence[ComparedRun | None]
) -> tuple[MetricRow, ...]:
    """Return a row per figure: predicted, then measured if a run measured it."""
    predicted = [{metric.name: metric for metric in view.metrics} for view in views]
    measured = [{metric.name: metric for metric in run.metrics} if run else {} for run in runs]
    # A prediction is not marked as better if a configuration cannot run, or if others are measured.
    judged = all(view.feasible for view in views) and not any(runs)
    rows = [
        _row(
            name,
            [metrics.get(name) for metrics in each],
            judged=judged or is_measured,
            measured=is_measured,
        )
        for name in dict.fromkeys(name for metrics in (*predicted, *measured) for name in metrics)
        for is_measured, each in ((False, predicted), (True, measured))
        if any(name in metrics for metrics in each)
    ]
    return tuple(
        replace(row, repeats=place > 0 and not row.measured and _repeats(row, rows[0]))
        for place, row in enumerate(rows)
    )


def _repeats(row: MetricRow, first: MetricRow) -> bool:
    """Return whether a row has the same changes as the first row, or their inverse.

    Rows of tokens per second never count as repetitions, so they are always shown.
    """
    pairs = [
        (one, other)
        for one, other in zip(row.changes, first.changes, strict=True)
        if one is not None and other is not None
    ]
    same = all(abs(one - other) < EQUAL for one, other in pairs)
    inverse = all(abs((1.0 + one) * (1.0 + other) - 1.0) < EQUAL for one, other in pairs)
    return bool(pairs) and (same or inverse) and "okens/s" not in row.name


def _row(name: str, metrics: Sequence[Metric | None], *, judged: bool, measured: bool) -> MetricRow:
    values = tuple(metric.value if metric else None for metric in metrics)
    unit = next(metric.unit for metric in metrics if metric)
    changes = tuple(
        value / values[0] - 1.0 if place and values[0] and value is not None else None
        for place, value in enumerate(values)
    )
    return MetricRow(
        name=name,
        unit=unit,
        values=values,
        changes=changes,
        best=_best_index(values, unit) if judged else None,
        measured=measured,
    )


def _best_index(values: Sequence[float | None], unit: Unit) -> int | None:
    known = [value for value in values if value is not None]
    least, most = min(known), max(known)
    if most - least <= EQUAL * abs(least):
        return None
    return values.index(least if unit in LESS_IS_BETTER else most)


def _memory_chart(
    names: Sequence[str], views: Sequence[ConfigurationView], runs: Sequence[ComparedRun | None]
) -> Stack | None:
    """Plot the predicted memory of the fullest stages, each above its measured peak."""
    rows = []
    for name, view, run in zip(names, views, runs, strict=True):
        if view.memory is not None:
            bar = max(view.memory.bars, key=lambda bar: bar.total)
            rows.append(
                BarSpec(
                    label=name,
                    note=bar.label.lower(),
                    parts=bar.values,
                    limit=view.memory.limit,
                    interval=bar.interval,
                )
            )
        if peak := measured_peak(run):
            rows.append(BarSpec(label=name, note="measured", parts={"measured": peak}))
    return stack(rows, unit="bytes") if rows else None


def _time_chart(
    names: Sequence[str], views: Sequence[ConfigurationView], sides: Sequence[Side], predicted: str
) -> Stack | None:
    """Plot the predicted time of each configuration, each above its measured time."""
    has_runs = any(side.run for side in sides)
    rows = []
    for name, view, side in zip(names, views, sides, strict=True):
        if view.time is not None:
            bar = view.time.bars[0]
            rows.append(
                BarSpec(
                    label=name, note=predicted * has_runs, parts=bar.values, interval=bar.interval
                )
            )
        if parts := measured_parts(side.run):
            rows.append(BarSpec(label=name, note="measured", parts=parts))
    return stack(rows, unit="seconds") if rows else None
