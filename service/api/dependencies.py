"""Dependencies of routes. All of them are async, because FastAPI would run others in threads."""

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
from service.http.answer_cache import Learnt, applied_calibration
from service.http.ownership import PrincipalStore
from service.http.turns import Turns
from service.keys import Principal
from service.settings import Settings


async def get_settings(request: Request) -> Settings:
    """Return the settings of the service."""
    return cast(Settings, request.app.state.settings)


async def get_principal(request: Request) -> Principal:
    """Return the caller. The gate has already checked its key."""
    return cast(Principal, request.state.principal)


async def get_store(request: Request) -> Store:
    """Return the store, restricted to the caller's rights."""
    state = request.app.state
    return cast(
        Store,
        PrincipalStore(
            store=state.store, principal=request.state.principal, settings=state.settings
        ),
    )


async def get_watch_store(store: StoreDep) -> WatchStore:
    """Return the store of watched jobs, restricted to the caller's rights."""
    return cast(WatchStore, store)


async def get_system_store(request: Request) -> AccessStore:
    """Return the unrestricted store, for administrators and for routes without user data."""
    return cast(AccessStore, request.app.state.store)


async def get_find(store: StoreDep) -> Find:
    """Return the lookup of registered names, cached so that names are stable within a request."""

    @lru_cache(maxsize=256)
    def find(kind: RegistrationKind, name: str) -> JsonObject | None:
        record = store.get_registration(kind=kind, name=name)
        return None if record is None else record.spec

    return find


def refit_due_calibrations(request: Request) -> None:
    """Fit the calibrations that are due. Runs in a thread."""
    request.app.state.calibrations.refit()


async def get_calibrations(
    request: Request,
    calibration: Annotated[
        bool, Query(description="Correct predictions by the cluster's calibration")
    ] = True,
) -> Calibrations | None:
    """Return the newest stored calibrations; None if the request disables them."""
    stored: StoredCalibrations = request.app.state.calibrations
    return stored.of(request.state.principal.owner or "") if calibration else None


class RecordingCalibrations:
    """Calibrations that record which of them an answer uses."""

    def __init__(self, calibrations: Calibrations, learnt: Learnt) -> None:
        self._calibrations, self._learnt = calibrations, learnt
        self.unused = calibrations.unused

    def __call__(self, problem: TrainingProblem) -> CalibratedPredictor | None:
        self._learnt.append(
            (self._calibrations, problem, applied_calibration(self._calibrations, problem))
        )
        return self._calibrations(problem)


async def get_recording_calibrations(
    request: Request, calibrations: CalibrationsDep
) -> Calibrations | None:
    """Return calibrations that record their use, so that the cache can detect outdated answers."""
    learnt: Learnt = []
    request.state.learnt = learnt
    if calibrations is None:
        return None

    return RecordingCalibrations(calibrations, learnt)


async def _ranking_turn(request: Request) -> AsyncIterator[None]:
    async with wait_for_turn(request, request.app.state.ranking_turns):
        yield


async def _estimate_turn(request: Request) -> AsyncIterator[None]:
    async with wait_for_turn(request, request.app.state.estimate_turns):
        yield


@asynccontextmanager
async def wait_for_turn(request: Request, turns: Turns) -> AsyncIterator[None]:
    """Wait until it is the turn of the request's key, and hold the turn until the request ends.

    If the client disconnects, the work stops at its next `bounds.check_work`.

    Raises:
        LimitError: The wait was too long (`busy`).
    """
    async with turns.turn(request.state.principal.key_id):
        yield


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise InputError for query parameters that the route does not have."""
    if not request.query_params:
        return
    allowed = sorted(_query_parameters(request.scope["route"].dependant))
    for name in request.query_params:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(allowed) or 'none'}"
            raise InputError(
                f"Unknown parameter {name[:100]!r}; {hint}", field=name[:100], code="unknown_key"
            )


def versioned_router(prefix: str = "", *, tag: str) -> APIRouter:
    """Return a router for `/v1` + `prefix` that rejects unknown parameters."""
    return APIRouter(
        prefix=f"/v1{prefix}", tags=[tag], dependencies=[Depends(refuse_unknown_parameters)]
    )


async def refuse_body(request: Request) -> None:
    """Raise InputError if a request has a body that its route would ignore."""
    if (await request.body()).strip() not in (b"", b"{}"):
        raise InputError(
            "This route has no body. Pass its options as query parameters.", code="unknown_key"
        )


def _query_parameters(dependant: Dependant) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_query_parameters(other) for other in dependant.dependencies))


def in_utc(instant: datetime) -> datetime:
    """Convert a time to UTC; raise ValueError for years outside 1-9999."""
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise ValueError("the instant's year in UTC is out of range") from None


def reject_number(text: object) -> object:
    """Return the text; raise ValueError for numbers, which pydantic would parse as Unix times."""
    if isinstance(text, str) and re.fullmatch(r"\s*[-+]?[0-9._]+\s*", text):
        raise ValueError("use the format 2026-01-02T03:04:05Z")
    return text


Instant = Annotated[AwareDatetime, BeforeValidator(reject_number), AfterValidator(in_utc)]
Order = Literal["newest", "oldest"]
Cursor = Annotated[
    str | None, Query(max_length=200, description="`next_cursor` of the previous page")
]


def _paging(first: Order) -> Callable[..., Awaitable[Paging]]:
    async def paging(
        since: Annotated[Instant | None, Query(description="Created at this time or later")] = None,
        until: Annotated[Instant | None, Query(description="Created before this time")] = None,
        order: Annotated[Order, Query(description="Sort order")] = first,
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
RefittedDep = Annotated[None, Depends(refit_due_calibrations)]
"""Fits calibrations that are due before the route uses them."""
RecordedDep = Annotated[Calibrations | None, Depends(get_recording_calibrations)]
CalibrationsDep = Annotated[Calibrations | None, Depends(get_calibrations)]
RankingTurn = Annotated[None, Depends(_ranking_turn, scope="function")]
"""Last parameter of routes that rank configurations. Keys take turns."""
EstimateTurn = Annotated[None, Depends(_estimate_turn, scope="function")]
"""Like RankingTurn, for estimates, which do not wait for rankings."""
