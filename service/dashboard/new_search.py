"""Page /searches/new: the form, its preview while the user types, and its submission."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi import Query as QueryParameter
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response
from starlette.status import HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool import catalog
from hp_tool.domain.plan import SearchPlan
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Kind, Query
from hp_tool.domain.records import Label, WorkerRecord
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.domain.targets import Targets
from hp_tool.domain.units import GIB
from hp_tool.errors import HpToolError, InputError
from hp_tool.loop.tuning import check_offered, resolve_search
from hp_tool.loop.tuning.plan import bill
from hp_tool.questions import schema, training
from hp_tool.questions.answers import RecommendAnswer, answer_recommend
from hp_tool.questions.form_fields import Section, form_sections
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.wording.bill import bill_sentences
from hp_tool.wording.rankings import SERVING, TRAINING, Table
from hp_tool.wording.words import serving_arithmetic
from service.api.bodies import json_response, resolve
from service.api.dependencies import CalibrationsDep, FindDep, RankingTurn, StoreDep, turn
from service.api.searches import searched
from service.dashboard.figures import Figure, Trace, line, markers
from service.dashboard.formats import arithmetic, count, details, seconds
from service.dashboard.new_search_form import (
    FRAMEWORKS,
    RecipeChoice,
    check_names,
    kind_of,
    recipe_choices,
    to_query,
    to_values,
)
from service.dashboard.page import ErrorFields, Form, Page, csv_response, page_at, read_form, render
from service.dashboard.ranking import RankedRow, best_by_layout, ranked_row
from service.dashboard.run import Way, as_text

MAX_ROWS = 8
MAX_POINTS = 60
"""Configurations drawn in the plot."""
LOG_FROM = 20.0
"""Ratio of the longest to the shortest latency from which an axis is logarithmic, so that one slow
configuration does not compress the others.
"""
FRONT = {"color": "--series-3", "width": 2}
EXAMPLE = {"kind": "training", "cluster.gpus_per_node": "8"}

router = APIRouter(prefix="/searches/new", tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The cost model's answer to the current fields."""

    kind: Kind
    error: ErrorFields | None
    """The error; the rest is then empty."""
    calibrated: bool = False
    """Whether measurements on the cluster calibrate the figures."""
    rows: tuple[RankedRow, ...] = ()
    misses: tuple[RankedRow, ...] = ()
    """The nearest infeasible configurations, if none is feasible."""
    legal: int = 0
    feasible: int = 0
    pruned: int = 0
    groups: tuple[int, ...] = ()
    """Number of layouts in each group."""
    seconds: float = 0.0
    rejections: tuple[tuple[str, int], ...] = ()
    """Reasons for rejected candidates, and their numbers."""
    figures: tuple[Figure, ...] = ()
    """For plot.js."""
    unsearchable: str | None = None
    """Reason why profile runs cannot search this query; the predictions are valid."""
    refused: bool = False
    """Whether a search of it would be rejected. A search without a suitable worker waits for
    one.
    """
    plan: SearchPlan | None = None
    """Predicted cost of a search; None for serving."""
    bill: tuple[str, ...] = ()
    """The plan's cost in words: expected, and at worst."""
    commands: tuple[Way, ...] = ()

    @property
    def table(self) -> Table:
        """The ranked rows with their columns."""
        return Table(
            columns=TRAINING if self.kind == "training" else SERVING, rows=self.rows or self.misses
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSearchPage(Page):
    """The form of a new search."""

    kind: Kind
    sections: tuple[Section, ...]
    suggestions: dict[str, tuple[str, ...]]
    """Names to suggest, by kind: models, gpus, clusters."""
    recipes: tuple[RecipeChoice, ...]
    values: dict[str, str]
    """The form's values by field."""
    error: ErrorFields | None
    """Why the search was rejected."""
    preview: Preview | None = None
    """The answer to the values, if the address requests it, as browsers without scripts do."""


Ranked = Annotated[bool, QueryParameter(description="Also answer the fields in the address")]


async def _turn_if_ranked(request: Request, ranked: Ranked = False) -> AsyncIterator[None]:
    """Wait for the turn of the request's key if the page ranks configurations."""
    if not ranked:
        yield
        return
    async with turn(request, request.app.state.ranking_turns):
        yield


@page_at(router, "", template="new_search.html", section="New search")
def form_context(
    request: Request,
    store: StoreDep,
    clone: Annotated[
        str | None,
        QueryParameter(
            alias="from", max_length=16, description="A search whose query fills the form"
        ),
    ] = None,
    ranked: Ranked = False,
    *,
    find: FindDep,
    calibrations: CalibrationsDep,
    _turn: Annotated[None, Depends(_turn_if_ranked, scope="function")] = None,
) -> NewSearchPage:
    """Return the form of a new search, filled with a search or the fields in the address."""
    if clone is not None:
        query = schema.query_mapping(schema.parse_query(store.get_search(search_id=clone).query))
        return form_page(to_values(query), store=store)
    values = read_form(request.url.query) or EXAMPLE
    check_names(values, own=("name", "ranked"))
    with contextlib.suppress(InputError):  # The preview shows it.
        named = {name: values[name] for name in ("name",) if name in values}
        values = named | to_values(to_query(values))  # Paths without a field go into the YAML.
    page = form_page(values, store=store)
    return (
        replace(page, preview=preview(values, request, store, find, calibrations, None))
        if ranked
        else page
    )


def form_page(values: Mapping[str, str], *, store: Store) -> NewSearchPage:
    """Return the context of the form's page with these values."""
    registered = {kind: tuple(store.registered_names(kind=kind)) for kind in ("model", "cluster")}
    return NewSearchPage(
        title="New search",
        json_href="/searches/new.json",
        kind=kind_of(values),
        sections=form_sections(kind_of(values)),
        suggestions={
            "models": (*registered["model"], *catalog.names("models")),
            "gpus": tuple(catalog.names("gpus")),
            "clusters": registered["cluster"],
            "frameworks": FRAMEWORKS,
            "trainers": tuple(catalog.names("trainers")),
        },
        recipes=recipe_choices(),
        values=dict(values),
        error=None,
    )


def preview(
    values: Form,
    request: Request,
    store: StoreDep,
    find: FindDep,
    calibrations: CalibrationsDep,
    _turn: RankingTurn,
) -> Preview:
    """Return the answer to the form's values; an error in them is an answer too."""
    try:
        query = schema.parse_query(to_query(values))
        resolved = resolve(query, find=find)
        answer = answer_recommend(resolved, top=MAX_POINTS, calibrations=calibrations)
        figures = _figures(resolved, replace(answer, pareto=_front(resolved, calibrations)))
    except HpToolError as error:
        return Preview(kind=kind_of(values), error=error.as_dict())
    plan = _plan(resolved, store=store) if answer.recommendations else None
    trained = [row for row in answer.recommendations if isinstance(row, Recommendation)]
    listed = best_by_layout(trained) if trained else answer.recommendations
    # Links and commands use the query as typed, with registered names.
    return Preview(
        kind=query.kind,
        error=None,
        calibrated=any(
            isinstance(row, Recommendation) and row.calibrated_estimate
            for row in answer.recommendations
        ),
        rows=tuple(ranked_row(row, query=query, chosen=row.rank == 1) for row in listed[:MAX_ROWS]),
        misses=tuple(ranked_row(row, query=query) for row in answer.nearest_misses),
        legal=answer.space.legal,
        feasible=answer.space.feasible,
        pruned=answer.space.pruned,
        groups=answer.groups,
        seconds=answer.space.seconds,
        rejections=tuple(sorted(answer.rejections.items(), key=lambda item: -item[1])),
        figures=figures,
        unsearchable=_unsearchable(resolved, workers=store.live_workers()),
        refused=_unsearchable(resolved, workers=()) is not None,
        plan=plan,
        bill=() if plan is None else bill_sentences(plan),
        commands=as_text(query, server=str(request.base_url).rstrip("/")),
    )


PreviewDep = Annotated[Preview, Depends(preview)]


@router.post("/preview.json", response_model=Preview)
def preview_json(page: PreviewDep) -> Response:
    """Return the cost model's answer to a form, whose fields are named by their paths in a
    query.
    """
    return json_response(page)


@router.post("/preview", response_class=HTMLResponse, include_in_schema=False)
def preview_html(page: PreviewDep) -> HTMLResponse:
    return render("preview.html", page=page)


@router.post("/preview.csv", include_in_schema=False)
def preview_csv(page: PreviewDep) -> Response:
    return csv_response(page.table, name="configurations")


@router.post("", include_in_schema=False)
def submit(values: Form, store: StoreDep, find: FindDep) -> Response:
    """Queue the search and redirect to its page; on an error, show the form again with the
    message.
    """
    try:
        sent, label = to_query(values), schema.parse(Label, {"name": values.get("name", "")})
        record = store.create_search(**searched(schema.parse_query(sent), sent=sent, find=find))
        if label.name:
            store.label_search(search_id=record.id, label=label)
    except HpToolError as error:
        page = replace(form_page(values, store=store), error=error.as_dict())
        return render(
            "new_search.html",
            page=page,
            section="New search",
            status=HTTP_422_UNPROCESSABLE_CONTENT,
        )
    return RedirectResponse(f"/searches/{record.id}", status_code=303)


def _unsearchable(query: Query, *, workers: Sequence[WorkerRecord]) -> str | None:
    try:
        resolve_search(query)
        check_offered(query, workers)
    except HpToolError as error:
        return error.message
    return None


def _plan(query: Query, *, store: Store) -> SearchPlan | None:
    with contextlib.suppress(HpToolError):  # The reason why it cannot be searched.
        return bill(query, store=store).plan
    return None


def _front(query: Query, calibrations: Calibrations | None) -> tuple[Recommendation, ...]:
    """Return the Pareto front of step time and memory; empty for serving, and if it would be too
    expensive.
    """
    if query.kind == "inference":
        return ()
    try:
        return training.pareto_front(query=query, against="memory", calibrations=calibrations)
    except HpToolError:
        return ()


def _figures(query: Query, answer: RecommendAnswer) -> tuple[Figure, ...]:
    if query.kind == "training":
        rows = [
            row
            for row in (*answer.recommendations, *(answer.pareto or ()))
            if isinstance(row, Recommendation)
        ]
        return (_training_figure(rows, front=answer.pareto or ()),) if rows else ()
    # An unknown load's front; else without targets, so that the plot also shows configurations that
    # miss them.
    rows_shown = (
        answer.throughput_front
        or answer_recommend(replace(query, targets=None), top=MAX_POINTS).recommendations
    )
    serving_rows = [row for row in rows_shown if isinstance(row, ServingRecommendation)]
    return _serving_figures(serving_rows, targets=query.targets) if serving_rows else ()


def _training_figure(rows: Sequence[Recommendation], *, front: Sequence[Recommendation]) -> Figure:
    """Plot throughput over memory, with the Pareto front and the device's memory."""
    best = min(rows, key=lambda row: row.rank)
    front_points = sorted(map(_memory_and_rate, front), key=lambda point: point[0])
    limit = (
        max(
            (e.memory.capacity_bytes for e in (row.preferred_estimate for row in rows) if e.memory),
            default=0.0,
        )
        / GIB
    )
    return {
        "traces": [
            _candidates("Candidates", rows, marker={"color": "--series-1", "opacity": 0.6}),
            line(
                "Pareto front",
                x=(x for x, _ in front_points),
                y=(y for _, y in front_points),
                style=FRONT,
            ),
            _candidates(
                "Recommended", [best], marker={"color": "--good", "size": 15, "symbol": "star"}
            ),
        ],
        "x": {"title": "Memory per GPU, GiB"},
        "y": {"title": "Tokens/s per GPU"},
        "shapes": [{"at": limit, "color": "--bad"}] if limit else [],
    }


def _candidates(name: str, rows: Sequence[Recommendation], *, marker: dict[str, object]) -> Trace:
    points = [_memory_and_rate(row) for row in rows]
    text = [
        f"{arithmetic(row.parallel)}\n{details(row.parallel)}\n{memory:.1f} GiB, {rate:,.0f} "
        "tokens/s per GPU"
        for row, (memory, rate) in zip(rows, points, strict=True)
    ]
    return markers(
        name, x=(x for x, _ in points), y=(y for _, y in points), text=text, marker=marker
    )


def _memory_and_rate(row: Recommendation) -> tuple[float, float]:
    estimate = row.preferred_estimate
    return (
        estimate.memory.total_bytes / GIB if estimate.memory else 0.0,
        estimate.tokens_per_second_per_gpu or 0.0,
    )


def _serving_figures(
    rows: Sequence[ServingRecommendation], *, targets: Targets | None
) -> tuple[Figure, ...]:
    """Plot throughput over both latencies; the region that meets a target is shaded."""
    return tuple(
        latency_figure(name, rows, getattr(targets, name) if targets is not None else None)
        for name in ("ttft_s", "tpot_s")
    )


def latency_figure(name: str, rows: Sequence[ServingRecommendation], limit: float | None) -> Figure:
    """Plot throughput over one latency; `limit` is the target, in seconds."""
    letters = name.removesuffix("_s").upper()
    known = (
        (getattr(row.estimate, name), row.estimate.output_tokens_per_second_per_gpu, row)
        for row in rows
    )
    points = [
        (latency, rate, row)
        for latency, rate, row in known
        if latency is not None and rate is not None
    ]
    text = [
        f"{serving_arithmetic(row.parallel, replicas=row.estimate.replicas)}\n{letters} "
        f"{seconds(latency)}\n"
        f"{count(rate)} tokens/s per GPU"
        for latency, rate, row in points
    ]
    latencies = [latency for latency, _, _ in points]
    unit = (
        {"title": f"{letters}, ms", "times": 1e3}
        if min(latencies, default=1.0) < 1.0
        else {"title": f"{letters}, s"}
    )
    far = max(latencies, default=1.0) > LOG_FROM * min(latencies, default=1.0)
    scale = {"log": True} if far else {"zero": True}
    best = [
        not any(each[0] <= latency and each[1] > rate for each in points)
        for latency, rate, _ in points
    ]
    front = sorted(
        (latency, rate) for (latency, rate, _), there in zip(points, best, strict=True) if there
    )
    labels = [
        each.partition("\n")[0] if there else "" for each, there in zip(text, best, strict=True)
    ]
    marker = {"color": "--series-1", "size": 7, "labels": labels}
    shade = [{"to": limit, "color": "--good", "label": "target"}] if limit is not None else []
    drawn = (
        [line("Pareto front", x=(x for x, _ in front), y=(y for _, y in front), style=FRONT)]
        if len(front) > 1
        else []
    )
    return {
        "traces": [
            markers(
                "Configurations",
                x=latencies,
                y=(each[1] for each in points),
                text=text,
                marker=marker,
            ),
            *drawn,
        ],
        "x": unit | scale,
        "y": {"title": "Output tokens/s per GPU"},
        "shapes": shade,
    }
