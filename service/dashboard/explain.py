"""Page /explain: explain an uploaded trace or log, and store it as a measurement on request."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from starlette.datastructures import FormData
from starlette.status import HTTP_200_OK, HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool.domain.access import Scope
from hp_tool.domain.parts import PARTS
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Query
from hp_tool.domain.units import format_count
from hp_tool.errors import HpToolError, StoreError
from hp_tool.loop.learning import add_report
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.registered import Find
from hp_tool.traces.explain.checks import refusal_reasons
from hp_tool.traces.explain.explanation import Explanation, RankStep, Suggestion
from hp_tool.traces.explain.logged import LoggedExplanation, TimerSpread
from hp_tool.traces.files import MAX_FILES
from hp_tool.traces.timeline.use import LinkUse
from service.analysis.job import parse_answer
from service.api.bodies import resolve_names
from service.api.dependencies import FindDep, PrincipalDep, SettingsDep, StoreDep
from service.api.explanations import check_fields, explain_uploads, read_upload_query, with_form
from service.dashboard import formats
from service.dashboard.configuration import QueryText
from service.dashboard.figures import BarSpec, Stack, stack
from service.dashboard.page import ErrorFields, Page, address, configuration_href, page_at, render
from service.dashboard.ranking import run_href
from service.http.routes import EXPLAIN_PAGE
from service.http.turns import BUSY
from service.keys import Principal
from service.settings import Settings

KEEP = "keep"
"""Form field: whether to store the step and its parts as a measurement."""
MAX_RANKS = 32
"""Maximum number of ranks in the table, sorted by how long other ranks wait for them."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """One part of the step."""

    name: str
    measured_s: float
    predicted_s: float | None
    hidden_s: float | None = None

    @property
    def difference_s(self) -> float | None:
        """Measured minus predicted seconds."""
        return None if self.predicted_s is None else self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRow:
    """A suggested change, the seconds it saves, and its page."""

    change: str
    part: str
    seconds: float
    seconds_interval: tuple[float, float]
    flags: tuple[dict[str, str | None], ...]
    href: str
    run_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The explanation of a recorded step."""

    headline: str
    sentences: tuple[str, ...]
    parts: tuple[PartRow, ...]
    figure: Stack
    changes: tuple[ChangeRow, ...] = ()
    critical_rank: int | None = None
    ranks: tuple[RankStep, ...] = ()
    more_ranks: int = 0
    links: tuple[LinkUse, ...] = ()
    timers: tuple[TimerSpread, ...] = ()
    """Megatron's timers over all ranks, from a log."""
    matmul: str | None = None
    kept: str | None = None
    """State of the measurement, if the step was stored."""
    held_because: str | None = None
    """Why the stored step is held for review."""
    not_kept: str | None = None
    """Why the step was not stored, although requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainPage(Page):
    """The form for traces; explanations are shown only in its response."""

    query: str = ""
    """Query for the recorded configuration, as typed."""
    most_files: int = MAX_FILES
    megabytes: int = 0
    """Maximum size of an upload, in MB."""
    error: ErrorFields | None = None
    explained: Explained | None = field(default=None)


@page_at(router, EXPLAIN_PAGE, template="explain.html", section="Explain")
def explain_context(settings: SettingsDep, query: QueryText = "") -> ExplainPage:
    """Return the form for traces."""
    return ExplainPage(
        title="Explain a run",
        json_href=address("/explain.json", {"query": query}),
        query=query,
        megabytes=settings.max_batch_bytes >> 20,
    )


@router.post(EXPLAIN_PAGE, include_in_schema=False)
async def explain_upload(
    request: Request, settings: SettingsDep, find: FindDep, store: StoreDep, principal: PrincipalDep
) -> HTMLResponse:
    """Explain the uploaded files, as POST /v1/explanations does."""
    page = explain_context(settings)
    try:
        page = await with_form(
            request,
            partial(_answer, page, find=find, store=store, principal=principal, settings=settings),
            settings=settings,
            texts=2,
        )
    except HpToolError as error:
        if error.code in (
            "client_gone",
            "payload_too_large",
            "request_timeout",
            BUSY,
        ):  # The form was not read.
            raise
        page = replace(page, error=error.as_dict())
    status = HTTP_200_OK if page.error is None else HTTP_422_UNPROCESSABLE_CONTENT
    return render("explain.html", page=page, section="Explain", status=status)


def _answer(
    page: ExplainPage,
    form: FormData,
    *,
    find: Find,
    store: Store,
    principal: Principal,
    settings: Settings,
) -> ExplainPage:
    text = form.get("query")
    page = replace(page, query=text if isinstance(text, str) else "")
    try:
        check_fields(form, texts=("query", KEEP))
        query = read_upload_query(form, find=find)
        keeps = KEEP in form
        answer = parse_answer(explain_uploads(form, query=query, settings=settings))
        typed = None if query is None else schema.parse_query(page.query)
        explained = (
            _explain_log(answer)
            if isinstance(answer, LoggedExplanation)
            else _explain_traces(answer, typed)
        )
        if keeps:
            explained = _with_measurement(
                explained, answer, find=find, store=store, principal=principal
            )
        return replace(page, explained=explained)
    except HpToolError as error:
        return replace(page, error=error.as_dict())


def _with_measurement(
    explained: Explained,
    answer: Explanation | LoggedExplanation,
    *,
    find: Find,
    store: Store,
    principal: Principal,
) -> Explained:
    """Return the explanation with its step stored as a measurement, or with the reason why not."""
    if isinstance(answer, LoggedExplanation):
        return replace(
            explained, not_kept="timers in a log do not cover every part of a step; upload a trace"
        )
    if answer.teaches is None:
        return replace(
            explained,
            not_kept="add the query of the recorded configuration",
        )
    if answer.report is None:
        return replace(
            explained,
            not_kept=f"the trace does not match the query: {refusal_reasons(answer.checks)}",
        )
    if principal.scope < Scope.SUBMIT:
        return replace(explained, not_kept="your key cannot store measurements")
    report = json.dumps(schema.to_dict(answer.report)).encode()
    try:
        record = add_report(
            report,
            store=store,
            source="reported",
            key=None,
            resolve=partial(resolve_names, find=find),
            hold=answer.teaches == "held",
        )
    except StoreError:
        raise
    except HpToolError as error:
        return replace(explained, not_kept=error.message)
    return replace(
        explained,
        kept=record.state,
        held_because=refusal_reasons(answer.checks) if record.state == "held" else None,
    )


def _explain_traces(answer: Explanation, typed: Query | None) -> Explained:
    step = answer.critical
    predicted = {
        part.name: part.predicted_s for part in answer.parts if part.predicted_s is not None
    }
    rows = tuple(
        PartRow(
            name=part,
            measured_s=seconds,
            predicted_s=predicted.get(part),
            hidden_s=step.hidden_s.get(part),
        )
        for part, seconds in step.parts_s.items()
        if max(seconds, predicted.get(part, 0.0), step.hidden_s.get(part, 0.0)) > 0.0
    )
    steps = (
        format_count(answer.steps, "step")
        if answer.marked
        else "no step is marked: all recorded work"
    )
    count = f"{steps}, {format_count(len(answer.ranks), 'rank')}"
    pace = f" Rank {answer.critical_rank} sets the pace." if len(answer.ranks) > 1 else ""
    rate, share = answer.matmul_flops_per_second, answer.tensor_core_share
    of_peak = "" if share is None else f", {formats.share(share)} of the device's peak"
    ranks = sorted(answer.ranks, key=lambda rank: -rank.own_s)
    return Explained(
        headline=f"{formats.seconds(answer.step_s)} per step ({count}).{pace}",
        sentences=tuple(finding.text for finding in answer.findings),
        parts=rows,
        figure=_figure(rows),
        changes=() if typed is None else tuple(_change(each, typed) for each in answer.suggestions),
        critical_rank=answer.critical_rank,
        ranks=tuple(ranks[:MAX_RANKS]),
        more_ranks=max(len(ranks) - MAX_RANKS, 0),
        links=answer.links,
        matmul=None if rate is None else f"Matmuls run at {formats.tflops(rate)}{of_peak}.",
    )


def _change(each: Suggestion, typed: Query) -> ChangeRow:
    after = Configuration.from_row(each, query=typed)
    return ChangeRow(
        change=each.change,
        part=PARTS[each.part].in_words,
        seconds=each.seconds,
        seconds_interval=each.seconds_interval,
        flags=each.flags,
        href=configuration_href(after),
        run_href=run_href(after),
    )


def _explain_log(answer: LoggedExplanation) -> Explained:
    rows = tuple(
        PartRow(name=each.name, measured_s=each.measured_s, predicted_s=each.predicted_s)
        for each in answer.parts
    )
    return Explained(
        headline=f"{formats.seconds(answer.step_s)} per step by Megatron's timers "
        f"({format_count(answer.steps, 'print')}).",
        sentences=tuple(finding.text for finding in answer.findings),
        parts=tuple(replace(row, name=PARTS[row.name].in_words) for row in rows),
        figure=_figure(rows),
        timers=answer.timers,
    )


def _figure(rows: tuple[PartRow, ...]) -> Stack:
    """Plot the measured step and, with a query, the predicted step."""
    bars = [BarSpec(label="Measured", parts={row.name: row.measured_s for row in rows})]
    if any(row.predicted_s is not None for row in rows):
        bars.append(
            BarSpec(label="Predicted", parts={row.name: row.predicted_s or 0.0 for row in rows})
        )
    return stack(bars, unit="seconds")
