"""Dependencies of the routes. All are async: FastAPI runs others in a thread, which takes longer
than they do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Depends, Query, Request
from fastapi.dependencies.models import Dependant
from pydantic import AfterValidator, AwareDatetime, BeforeValidator

from hp_tool.domain.access import AccessStore
from hp_tool.domain.ports import Store, WatchStore
from hp_tool.domain.records import JsonObject, Paging, RegistrationKind
from hp_tool.errors import InputError
from hp_tool.loop.learning import StoredCalibrations
from hp_tool.questions.registered import Find
from hp_tool.questions.training.calibrated import CalibratedPredictor, Calibrations
from hp_tool.questions.training.problem import TrainingProblem
from service.http.answer_cache import Learnt, applied
from service.http.ownership import PrincipalStore
from service.http.turns import Turns
from service.keys import Principal
from service.settings import Settings


async def get_settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


async def get_principal(request: Request) -> Principal:
    """The principal of a request, by the key that the gate checked."""
    return cast(Principal, request.state.principal)


async def get_store(request: Request) -> Store:
    """The store as the request's principal may use it."""
    state = request.app.state
    return cast(
        Store,
        PrincipalStore(
            store=state.store, principal=request.state.principal, settings=state.settings
        ),
    )


async def get_watch_store(store: StoreDep) -> WatchStore:
    """The store's watched jobs as the request's principal may use them."""
    return cast(WatchStore, store)


async def get_system_store(request: Request) -> AccessStore:
    """The whole store, for routes that only administrators reach, or that show nobody's data."""
    return cast(AccessStore, request.app.state.store)


async def get_find(store: StoreDep) -> Find:
    """Look-up of the names that the principal may use; within one request a name means one
    thing.
    """

    @lru_cache(maxsize=256)
    def find(kind: RegistrationKind, name: str) -> JsonObject | None:
        record = store.get_registration(kind=kind, name=name)
        return None if record is None else record.spec

    return find


def refitted(request: Request) -> None:
    """Fit calibrations that are due; in a thread."""
    request.app.state.calibrations.refit()


async def get_calibrations(
    request: Request,
    calibration: Annotated[
        bool, Query(description="Correct predictions by what is known of the cluster")
    ] = True,
) -> Calibrations | None:
    """The newest stored calibrations; None if the request wants the cost model alone."""
    stored: StoredCalibrations = request.app.state.calibrations
    return stored.of(request.state.principal.owner or "") if calibration else None


class Recorded:
    """Calibrations that note which ones an answer used."""

    def __init__(self, calibrations: Calibrations, learnt: Learnt) -> None:
        self._calibrations, self._learnt = calibrations, learnt
        self.unused = calibrations.unused

    def __call__(self, problem: TrainingProblem) -> CalibratedPredictor | None:
        self._learnt.append((self._calibrations, problem, applied(self._calibrations, problem)))
        return self._calibrations(problem)


async def get_recorded(request: Request, calibrations: CalibrationsDep) -> Calibrations | None:
    """The newest stored calibrations, recording which ones the answer used: the cache tells by them
    when it is out of date.
    """
    learnt: Learnt = []
    request.state.learnt = learnt
    if calibrations is None:
        return None

    return Recorded(calibrations, learnt)


async def _ranking_turn(request: Request) -> AsyncIterator[None]:
    async with turn(request, request.app.state.ranking_turns):
        yield


async def _estimate_turn(request: Request) -> AsyncIterator[None]:
    async with turn(request, request.app.state.estimate_turns):
        yield


@asynccontextmanager
async def turn(request: Request, turns: Turns) -> AsyncIterator[None]:
    """Wait for the turn of the request's key and hold it. Raises LimitError `busy`.

    The work itself finds at its first `bounds.check` that its client hung up meanwhile.
    """
    async with turns.turn(request.state.principal.key_id):
        yield


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise InputError for a parameter that the route does not know: it is a typing error, not to
    be ignored.
    """
    if not request.query_params:
        return
    known = sorted(_parameters(request.scope["route"].dependant))
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"
            raise InputError(
                f"unknown parameter {name[:100]!r}; {hint}", field=name[:100], code="unknown_key"
            )


def versioned(prefix: str = "", *, tag: str) -> APIRouter:
    """A router of the API's first version, below `prefix`."""
    return APIRouter(
        prefix=f"/v1{prefix}", tags=[tag], dependencies=[Depends(refuse_unknown_parameters)]
    )


async def refuse_body(request: Request) -> None:
    """Raise InputError where a route that reads no body gets one: its content would be ignored."""
    if (await request.body()).strip() not in (b"", b"{}"):
        raise InputError(
            "this route takes no body; give its options as query parameters", code="unknown_key"
        )


def _parameters(dependant: Dependant) -> set[str]:
    """The query parameters of a route, its dependencies' included."""
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_parameters(each) for each in dependant.dependencies))


def in_utc(instant: datetime) -> datetime:
    """The instant in UTC, in which the database compares. ValueError where UTC has no such year
    (before 1, after 9999).
    """
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise ValueError("no year of UTC holds this instant") from None


def no_number(text: object) -> object:
    """The text; ValueError for a number, which would be read as seconds since 1970, or milliseconds
    if it is large.
    """
    if isinstance(text, str) and re.fullmatch(r"\s*[-+]?[0-9._]+\s*", text):
        raise ValueError("give an instant as 2026-01-02T03:04:05Z")
    return text


Instant = Annotated[AwareDatetime, BeforeValidator(no_number), AfterValidator(in_utc)]
Order = Literal["newest", "oldest"]
Cursor = Annotated[
    str | None, Query(max_length=200, description="`next_cursor` of the page before")
]


def _paging(first: Order) -> Callable[..., Awaitable[Paging]]:
    """The parameters that long lists share; `first`: their default order."""

    async def paging(
        since: Annotated[
            Instant | None, Query(description="Created at this instant or later")
        ] = None,
        until: Annotated[Instant | None, Query(description="Created before this instant")] = None,
        order: Annotated[Order, Query(description="What comes first")] = first,
        cursor: Cursor = None,
    ) -> Paging:
        return Paging(since=since, until=until, oldest_first=order == "oldest", cursor=cursor)

    return paging


TrialPagingDep = Annotated[Paging, Depends(_paging("oldest"))]
PagingDep = Annotated[Paging, Depends(_paging("newest"))]
SettingsDep = Annotated[Settings, Depends(get_settings)]
StoreDep = Annotated[Store, Depends(get_store)]
WatchStoreDep = Annotated[WatchStore, Depends(get_watch_store)]
SystemStoreDep = Annotated[AccessStore, Depends(get_system_store)]
FindDep = Annotated[Find, Depends(get_find)]
PrincipalDep = Annotated[Principal, Depends(get_principal)]
RefittedDep = Annotated[None, Depends(refitted)]
"""What is due is fitted before the route reads."""
RecordedDep = Annotated[Calibrations | None, Depends(get_recorded)]
CalibrationsDep = Annotated[Calibrations | None, Depends(get_calibrations)]
RankingTurn = Annotated[None, Depends(_ranking_turn, scope="function")]
"""Last parameter of a route that ranks configurations: one ranking is computed at a time, in turns
by key.
"""
EstimateTurn = Annotated[None, Depends(_estimate_turn, scope="function")]
"""The same for estimates, which do not wait for rankings."""
