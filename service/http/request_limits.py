"""Limits per request: CPU time, open requests per key, and cancellation on disconnect."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hp_tool.domain.bounds import Bounds, apply_bounds
from hp_tool.errors import HpToolError, InputError, LimitError
from service.api.problems import problem
from service.http.routes import AGENTS_PATH, UPLOADS
from service.settings import Settings

WAITING = ("/events", "/result", AGENTS_PATH)
"""Path suffixes of requests that only wait, for a search or for other requests."""
RETRY_AFTER_S = 1.0
LISTEN_AFTER_S = 0.05
"""Seconds before the middleware listens for a disconnect. Most requests are answered sooner."""
_LAST_CHECK_S: ContextVar[float] = ContextVar("seen_s")
"""CPU time of this thread at the last check. Each call in the thread pool has its own context."""


class RequestLimits:
    """Innermost middleware. Cached answers do not reach it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.under_way: Counter[str | None] = Counter()
        """Number of open requests by key, with separate counts for waiting ones; None is not
        limited.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        principal = scope.get("state", {}).get("principal")
        waits = scope["path"].endswith(WAITING)
        key_id = (
            None
            if principal is None or principal.key_id is None
            else principal.key_id + waits * " waiting"
        )
        limit = self.settings.max_waiting_at_once if waits else self.settings.max_requests_at_once
        if key_id is not None and self.under_way[key_id] >= limit:
            advice = (
                "that wait for searches. Close one"
                if waits
                else "in progress. Send many queries as one POST /v1/batch"
            )
            error = LimitError(
                f"Key {principal.key_id} may have at most {limit} requests {advice}, or retry when "
                "one has ended.",
                retry_after_s=RETRY_AFTER_S,
                code="too_many_at_once",
            )
            await problem(error)(scope, receive, send)
            return
        uploads = scope["path"] in UPLOADS and scope["method"] == "POST"
        meter = Meter(max_s=self.settings.max_upload_cpu_s if uploads else self.settings.max_cpu_s)
        reader = RequestReader(receive, hung_up=meter.stop)
        bounds = Bounds(
            max_combinations=self.settings.max_combinations,
            max_values=self.settings.max_values,
            max_yaml_bytes=self.settings.max_yaml_bytes,
            check=meter,
        )
        self.under_way[key_id] += 1
        try:
            with apply_bounds(bounds):
                await self.app(scope, reader.receive, send)
        finally:
            # A thread may still be working for a request that the server cancelled at shutdown.
            meter.stop()
            reader.close()
            self.under_way[key_id] -= 1
            if not self.under_way[key_id]:
                del self.under_way[key_id]


class Meter:
    """Counts a request's combinations, limits its CPU time, and stops it on disconnect."""

    def __init__(self, *, max_s: float) -> None:
        self._max_s = max_s
        self._stopped = False

    def stop(self) -> None:
        """Stop the work at its next check."""
        self._stopped = True

    def __call__(self, bounds: Bounds) -> None:
        if self._stopped:
            raise HpToolError("The client disconnected.", code="client_gone")
        now_s = time.thread_time()
        bounds.spent_s += now_s - _LAST_CHECK_S.get(now_s)
        _LAST_CHECK_S.set(now_s)
        max_s = self._max_s * bounds.questions
        if bounds.spent_s > max_s:
            if not bounds.planned:
                message = f"The request used its {max_s:g} s of CPU time. Send less in one request"
                raise InputError(message, code="request_too_costly")
            share = bounds.done / max(bounds.planned, 1)
            needed = f" (about {bounds.spent_s / share:,.0f} s needed)" if 0.0 < share < 1.0 else ""
            raise InputError(
                f"The request used its {max_s:g} s of CPU time{needed} after {bounds.done:,} of "
                f"{bounds.planned:,} combinations. Fix or narrow axes of `parallel` to leave at "
                f"most {int(bounds.done * 0.8):,} combinations",
                field="parallel",
                code="request_too_costly",
            )


class RequestReader:
    """Reads a request; after a delay, one message ahead of the route, to detect disconnects."""

    def __init__(self, receive: Receive, *, hung_up: Callable[[], None]) -> None:
        self._receive, self._hung_up = receive, hung_up
        self._asked = False
        self._heard: asyncio.Queue[Message | Exception] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._wait()

    async def receive(self) -> Message:
        """Return the next message. After a disconnect or an error, return it again."""
        if self._heard is None:
            self._asked = True
            try:
                return await self._receive()
            finally:
                self._asked = False
        message = await self._heard.get()
        if isinstance(message, Exception):
            self._heard.put_nowait(message)
            raise message
        if message["type"] == "http.disconnect":
            self._heard.put_nowait(message)
        return message

    def close(self) -> None:
        """Stop listening, because the request was answered."""
        self._timer.cancel()
        if self._listening is not None:
            self._listening.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LISTEN_AFTER_S, self._begin)

    def _begin(self) -> None:
        if self._asked:  # The route itself is reading the request.
            self._wait()
            return
        self._heard = asyncio.Queue(1)
        self._listening = asyncio.create_task(self._listen(self._heard))

    async def _listen(self, heard: asyncio.Queue[Message | Exception]) -> None:
        """Queue messages until the client disconnects. A fast sender has to wait."""
        try:
            while (message := await self._receive())["type"] != "http.disconnect":
                await heard.put(message)
        except Exception as error:
            await heard.put(error)  # Such as a body over the limit. The route reports the error.
        else:
            self._hung_up()
            await heard.put(message)
