"""Page /searches/new: a search's expected cost, its settings, and its submission.

The URL contains the query, as on the explorer page, which links here.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi import Query as QueryParameter
from fastapi.responses import RedirectResponse
from starlette.responses import Response
from starlette.status import HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool import catalog
from hp_tool.domain.plan import SearchPlan
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Kind, Query
from hp_tool.domain.records import Label, WorkerRecord
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError, InputError
from hp_tool.loop.tuning import check_offered, resolve_search
from hp_tool.loop.tuning.plan import bill
from hp_tool.questions import schema
from hp_tool.questions.answers import answer_recommend
from hp_tool.questions.form_fields import Section, form_sections
from hp_tool.questions.registered import Find
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.wording.bill import bill_sentences
from service.api.bodies import resolve_names
from service.api.dependencies import CalibrationsDep, FindDep, RankingTurn, StoreDep
from service.api.searches import prepare_search
from service.dashboard import formats
from service.dashboard.ask_question import Question
from service.dashboard.new_search_form import (
    EXTRA,
    check_names,
    kind_of,
    to_query,
    to_values,
)
from service.dashboard.page import ErrorFields, Form, Page, page_at, read_form, render
from service.dashboard.ranking import RankedRow, ranked_row
from service.dashboard.run import Way, as_text

OF_A_SEARCH = ("search.", "trainer")
"""Prefixes of the paths that this page sets. The explorer page sets the others."""

router = APIRouter(prefix="/searches/new", tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSearchPage(Page):
    """A search that is not yet started: its query, settings and expected cost."""

    kind: Kind
    values: dict[str, str]
    """Values of the query and the search's name, by path; empty if the URL names no model."""
    sections: tuple[Section, ...]
    """Settings of the search."""
    trainers: tuple[str, ...]
    question_href: str
    """URL of the explorer page with the same query."""
    error: ErrorFields | None = None
    """Why the query or the search was rejected. The other fields are then empty."""
    subject: str = ""
    """Model and cluster."""
    workload: str = ""
    """Work per step or request."""
    best: RankedRow | None = None
    """Configuration that is predicted to be the best; None if none fits."""
    unsearchable: str | None = None
    """Why profile runs cannot search this query. The predictions are still valid."""
    refused: bool = False
    """Whether a search would be rejected. A search that lacks a suitable worker waits instead."""
    plan: SearchPlan | None = None
    """Predicted cost of the search; None for serving."""
    bill: tuple[str, ...] = ()
    """Expected and maximum cost, in words."""
    commands: tuple[Way, ...] = ()

    @property
    def carried(self) -> dict[str, str]:
        """Values that have no field on this page."""
        shown = {field.name for section in self.sections for field in section.fields}
        return {path: text for path, text in self.values.items() if path not in {*shown, "name"}}


@page_at(router, "", template="new_search.html", section="Searches")
def new_search_context(
    request: Request,
    store: StoreDep,
    clone: Annotated[
        str | None,
        QueryParameter(alias="from", max_length=16, description="A search whose query to repeat"),
    ] = None,
    *,
    find: FindDep,
    calibrations: CalibrationsDep,
    _turn: RankingTurn,
) -> NewSearchPage:
    """Return a search with the query in the address, or with that of another search."""
    if clone is not None:
        query = schema.query_mapping(schema.parse_query(store.get_search(search_id=clone).query))
        values = to_values(query)
    else:
        values = read_form(request.url.query)
        check_names(values, own=("name",))
        with contextlib.suppress(InputError):  # The page reports the error.
            named = {name: values[name] for name in ("name",) if name in values}
            # Paths that have no field are part of the YAML.
            values = named | to_values(to_query(values))
    page = _page(values)
    if not page.values:
        return page
    return _with_cost(page, request, store=store, find=find, calibrations=calibrations)


@router.post("", include_in_schema=False)
def submit(values: Form, store: StoreDep, find: FindDep) -> Response:
    """Queue the search and redirect to its page. On an error, show the form with the message."""
    try:
        sent, label = to_query(values), schema.parse(Label, {"name": values.get("name", "")})
        record = store.create_search(
            **prepare_search(schema.parse_query(sent), sent=sent, find=find)
        )
        if label.name:
            store.label_search(search_id=record.id, label=label)
    except HpToolError as error:
        page = replace(_page(values), error=error.as_dict())
        return render(
            "new_search.html",
            page=page,
            section="Searches",
            status=HTTP_422_UNPROCESSABLE_CONTENT,
        )
    return RedirectResponse(f"/searches/{record.id}", status_code=303)


def _page(values: Mapping[str, str]) -> NewSearchPage:
    asked = {path: text for path, text in values.items() if path != "name"}
    return NewSearchPage(
        title="Start a search",
        json_href="/searches/new.json",
        kind=kind_of(values),
        values=dict(values) if "model" in values or EXTRA in values else {},
        sections=_sections(kind_of(values)),
        trainers=tuple(catalog.names("trainers")),
        question_href=Question(values=asked).href(),
    )


def _sections(kind: Kind) -> tuple[Section, ...]:
    """Return the form sections with search settings."""
    parts = (
        replace(
            part, fields=tuple(each for each in part.fields if each.name.startswith(OF_A_SEARCH))
        )
        for part in form_sections(kind)
    )
    return tuple(part for part in parts if part.fields)


def _with_cost(
    page: NewSearchPage,
    request: Request,
    *,
    store: Store,
    find: Find,
    calibrations: Calibrations | None,
) -> NewSearchPage:
    """Return the page with the predicted best configuration and the cost of the search."""
    try:
        query = schema.parse_query(to_query(page.values))
        resolved = resolve_names(query, find=find)
        answer = answer_recommend(resolved, top=1, calibrations=calibrations)
    except HpToolError as error:
        return replace(page, error=error.as_dict())
    mapping = schema.query_mapping(query)
    best = next(
        (
            row
            for row in answer.recommendations
            # Excludes comparisons of machines.
            if isinstance(row, Recommendation | ServingRecommendation)
        ),
        None,
    )
    plan = _plan(resolved, store=store) if best else None
    # Links and commands use the query as typed, with registered names.
    return replace(
        page,
        subject=formats.subject(mapping),
        workload=formats.workload(mapping),
        best=None if best is None else ranked_row(best, query=query),
        unsearchable=_unsearchable(resolved, workers=store.live_workers()),
        refused=_unsearchable(resolved, workers=()) is not None,
        plan=plan,
        bill=() if plan is None else bill_sentences(plan),
        commands=as_text(query, server=str(request.base_url).rstrip("/")),
    )


def _unsearchable(query: Query, *, workers: Sequence[WorkerRecord]) -> str | None:
    try:
        resolve_search(query)
        check_offered(query, workers)
    except HpToolError as error:
        return error.message
    return None


def _plan(query: Query, *, store: Store) -> SearchPlan | None:
    with contextlib.suppress(HpToolError):  # The page reports why the search cannot be prepared.
        return bill(query, store=store).plan
    return None
