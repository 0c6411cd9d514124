"""GET /v1/searches/{id}/events: what happens to a search, as server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from hp_tool.domain.ports import Store
from hp_tool.domain.records import EventRecord, SearchState
from hp_tool.errors import HpToolError, InputError
from service.api.dependencies import SettingsDep, StoreDep
from service.api.views import STREAM_END, EventView
from service.keys import Keyring

LARGEST_SEQ = 2**31 - 1
"""What the database's column holds."""

router = APIRouter(tags=["searches"])


def start_of(
    store: StoreDep,
    search_id: str,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=0, le=LARGEST_SEQ, description="Events with a greater seq; Last-Event-ID wins")] = 0,
) -> int:
    """Where the stream begins. Looked at before it does, while an error can still be answered as one."""
    store.get_search(search_id=search_id)
    if last_event_id is None:
        return after
    if not re.fullmatch(r"[0-9]{1,10}", last_event_id) or int(last_event_id) > LARGEST_SEQ:
        raise InputError(f"Last-Event-ID {last_event_id[:100]!r} is not an id of this stream", field="Last-Event-ID")
    return int(last_event_id)


@router.get("/searches/{search_id}/events", response_class=EventSourceResponse)
async def events(
    request: Request, search_id: str, store: StoreDep, settings: SettingsDep, start: Annotated[int, Depends(start_of)]
) -> AsyncIterator[ServerSentEvent]:
    """Every event from the beginning or after Last-Event-ID, then live until the search ends. The id is the event's seq."""
    seen = start
    while await _is_known(request):
        state, found = await run_in_threadpool(_look, store, search_id, seen)
        for record in found:
            seen = record.seq
            # No event name: a browser delivers named events only to those who know every name; the kind is in the data.
            yield ServerSentEvent(id=str(record.seq), data=EventView.of(record))
        if found:
            continue
        if state.ended:
            yield ServerSentEvent(event=STREAM_END, data={"state": state})
            return
        await anyio.sleep(settings.poll_s)


async def _is_known(request: Request) -> bool:
    """Whether the key that opened the stream still is one. Where not, the stream is cut off, and who connects again is told."""
    keyring: Keyring = request.app.state.keyring
    try:
        await keyring.principal(request.headers)
    except HpToolError:
        return False
    return True


def _look(store: Store, search_id: str, after: int) -> tuple[SearchState, list[EventRecord]]:
    # State first: events that were committed with the end are then surely in the list.
    state = store.get_search(search_id=search_id).state
    return state, store.events(search_id=search_id, after=after)
