"""Page /watches: running jobs against their past and expected pace, and advice on lost nodes."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse

from hp_tool.domain.access import Scope
from hp_tool.domain.watch import Expected, Loss, Verdict
from hp_tool.domain.watch_records import WatchRecord
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions import schema
from hp_tool.watch.course import Course, summarize_course
from hp_tool.watch.loss import after_loss
from hp_tool.watch.reports import verdict_of
from hp_tool.watch.words import doubts_query, faster_words
from hp_tool.wording.words import layout_arithmetic
from service.api.dependencies import CalibrationsDep, Cursor, PrincipalDep, WatchStoreDep
from service.api.views import View
from service.api.watches import MAX_LOST_NODES
from service.dashboard import formats
from service.dashboard.figures import Figure, line, markers
from service.dashboard.page import ErrorFields, Form, Page, Tone, address, done, next_href, page_at

MAX_ROWS = 50
TONES: dict[str, Tone] = {
    "learning": "busy",
    "as_expected": "good",
    "slower_than_it_was": "bad",
    "slower_than_it_should_be": "warn",
}
MAX_INTERVAL_RATIO = 3.0
"""Maximum ratio of an interval's upper bound to the expected step at which it is drawn."""
MAX_EXPECTED_RATIO = 4.0
"""Maximum ratio of the expected step to the slowest drawn step at which it is drawn."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRow(View):
    """One watched job in the list."""

    id: str
    name: str
    owner: str | None
    subject: str
    """Model and cluster; empty without a prediction."""
    status: str
    tone: Tone
    expected_s: float | None
    now_s: float | None
    """Current steady pace, in seconds per step."""
    slower_fraction: float | None
    """Slowdown against the job's past, or else against the expected pace; None without either."""
    query_doubted: bool
    """Whether the job is so much faster than expected that its query probably describes another
    job.
    """
    loss_per_day: Loss | None
    steps: int
    event: int
    updated_at: datetime
    href: str

    @staticmethod
    def computed(record: WatchRecord) -> dict[str, Any]:
        verdict = verdict_of(record, [])
        slower = verdict.slowdown or verdict.lag
        return {
            "subject": formats.subject(record.query) if record.query else "",
            "tone": TONES.get(record.status, ""),
            "expected_s": None if verdict.expected is None else verdict.expected.step_s,
            "now_s": None if verdict.now is None else verdict.now.step_s,
            "slower_fraction": None if slower is None else slower.factor - 1.0,
            "query_doubted": doubts_query(verdict),
            "loss_per_day": verdict.loss_per_day,
            "steps": verdict.steps,
            "href": f"/watches/{record.id}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchesPage(Page):
    """Watched jobs, newest first."""

    server: str
    """URL of this service."""
    rows: tuple[WatchRow, ...]
    next_href: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAdvice:
    """What to run without some nodes, and whether to wait for them."""

    arithmetic: str
    text: str
    step_s: float
    """Predicted step time in seconds."""
    own_step_s: float | None
    """The job's current pace times the predicted slowdown, in seconds per step; None until the pace
    is known.
    """
    idle_gpus: int
    href: str
    run_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPage(Page):
    """One watched job."""

    row: WatchRow
    verdict: Verdict
    faster: str
    """Sentence that the job is faster than expected; empty otherwise."""
    configuration_href: str | None
    webhook_state: str | None
    last_error: str | None
    teaching: str | None
    measurement_id: str | None
    slower_since: datetime | None
    """Approximate time at which the slowdown began."""
    figure: Figure | None
    """Plot of step times against step numbers, for plot.js; None before the first steady step."""
    expected_off_chart: bool
    """Whether the expected step is too slow to be drawn."""
    may_delete: bool
    lost_nodes: int | None = None
    loss: LossAdvice | None = None
    error: ErrorFields | None = None


@page_at(router, "/watches", template="watches.html", section="Watch")
def watches_context(request: Request, store: WatchStoreDep, cursor: Cursor = None) -> WatchesPage:
    """List watched jobs, newest first."""
    page = store.list_watches(limit=MAX_ROWS, cursor=cursor)
    rows = tuple(WatchRow.of(record) for record in page.items)
    return WatchesPage(
        title="Watch",
        json_href="/watches.json",
        server=str(request.base_url).rstrip("/"),
        rows=rows,
        next_href=next_href("/watches", page),
    )


@page_at(router, "/watches/{watch_id}", template="watch.html", section="Watch")
def watch_context(
    watch_id: str,
    store: WatchStoreDep,
    calibrations: CalibrationsDep,
    principal: PrincipalDep,
    lost_nodes: Annotated[
        int | None,
        Query(ge=1, le=MAX_LOST_NODES, description="Also what to run without so many of its nodes"),
    ] = None,
) -> WatchPage:
    """Return one watched job; with `lost_nodes`, also advice on continuing without them."""
    record = store.get_watch(watch_id=watch_id)
    reported = store.watch_sources(watch_id=watch_id)
    verdict, course = verdict_of(record, reported), summarize_course(record, reported)
    slowdown = verdict.slowdown
    text = None if record.query is None else formats.query_text(record.query)
    page = WatchPage(
        title=record.name or f"Job {record.id[:8]}",
        json_href=address(f"/watches/{record.id}.json", {"lost_nodes": lost_nodes}),
        row=WatchRow.of(record, status=verdict.status, tone=TONES[verdict.status]),
        verdict=verdict,
        faster=faster_words(verdict),
        configuration_href=text and address("/configurations", {"query": text}),
        webhook_state=record.webhook_state,
        last_error=record.last_error,
        teaching=record.teaching,
        measurement_id=record.measurement_id,
        slower_since=None
        if slowdown is None
        else _step_time_of_day(record.updated_at, course, slowdown.since_step),
        figure=_figure(course, verdict, record.updated_at),
        expected_off_chart=_is_off_chart(course, verdict),
        may_delete=principal.scope >= Scope.SUBMIT,
        lost_nodes=lost_nodes,
    )
    if lost_nodes is None:
        return page
    try:
        if record.query is None:
            raise InputError(
                "This watched job has no query, so its nodes are unknown. Register it again with "
                "a query.",
                field="query",
                code="missing_field",
            )
        answer = after_loss(
            schema.parse_query(record.query), lost_nodes=lost_nodes, calibrations=calibrations
        )
    except HpToolError as error:
        return replace(page, error=error.as_dict())
    left = formats.query_text(answer.query)
    loss = LossAdvice(
        arithmetic=layout_arithmetic(answer.recommendation.parallel),
        text=answer.text,
        step_s=answer.step_s,
        own_step_s=None if verdict.now is None else verdict.now.step_s / answer.pace,
        idle_gpus=answer.idle_gpus,
        href=address("/configurations", {"query": left}),
        run_href=address("/run", {"query": left}),
    )
    return replace(page, loss=loss)


@router.post("/watches/{watch_id}/delete", include_in_schema=False)
def delete(watch_id: str, fields: Form, store: WatchStoreDep) -> RedirectResponse:
    """Delete a job, as DELETE /v1/watches/{watch_id} does."""
    store.delete_watch(watch_id=watch_id)
    return done("/watches", "removed")


def _step_time_of_day(last: datetime, course: Course, step: int) -> datetime:
    """Estimate when a step ended, from the last report and the step times since; ignores pauses."""
    return last - timedelta(seconds=course.seconds_after(step))


def _figure(course: Course, verdict: Verdict, last: datetime) -> Figure | None:
    """Plot the steps, the median of each steady stretch, and the expected pace."""
    if not course.steps:
        return None
    text = (
        f"Step {number:,}\n{formats.seconds(each)}\nabout "
        f"{formats.moment(_step_time_of_day(last, course, number))}"
        for number, each in zip(course.steps, course.seconds, strict=True)
    )
    traces = [
        markers(
            "Steps",
            x=course.steps,
            y=course.seconds,
            text=text,
            marker={"color": "--series-1", "size": 4},
        ),
    ]
    paced = {"color": "--series-2", "width": 3}
    ends = [(each.first_step, each.last_step) for each in course.stretches]
    pace = [each.pace.step_s for each in course.stretches]
    traces.append(
        line(
            "Pace",
            x=[at for pair in ends for at in (*pair, None)],
            y=[at for each in pace for at in (each, each, None)],
            style=paced,
        )
    )
    if verdict.expected is not None and ends and not _is_off_chart(course, verdict):
        traces += _expected(verdict.expected, from_step=ends[0][0], to_step=ends[-1][1])
    slowdown = verdict.slowdown
    shapes = (
        []
        if slowdown is None
        else [{"at": slowdown.since_step, "color": "--bad", "label": "slower"}]
    )
    return {
        "traces": traces,
        "x": {"title": "Step", "whole": True},
        "y": {"title": "Seconds per step", "zero": True},
        "shapes": shapes,
    }


def _is_off_chart(course: Course, verdict: Verdict) -> bool:
    """Return whether the expected step is so slow that it would flatten the measured steps."""
    return (
        verdict.expected is not None
        and bool(course.seconds)
        and verdict.expected.step_s > MAX_EXPECTED_RATIO * max(course.seconds)
    )


def _expected(expected: Expected, *, from_step: int, to_step: int) -> list[Figure]:
    """Return lines for the expected step time and its 90% interval."""
    across = [from_step, to_step]
    middle = line(
        "Expected", x=across, y=[expected.step_s] * 2, style={"color": "--series-3", "width": 2}
    )
    dashed = {"color": "--series-3", "width": 1, "dash": True}
    ends = zip(
        ("90% interval, fast end", "90% interval, slow end"),
        expected.interval,
        strict=True,
    )
    near = [
        (name, end) for name, end in ends if end < MAX_INTERVAL_RATIO * expected.step_s
    ]  # A bound far above the steps would compress everything else.
    return [middle, *(line(name, x=across, y=[end] * 2, style=dashed) for name, end in near)]
