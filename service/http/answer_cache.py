"""Server-side cache of estimates and recommendations, and ETags for clients.

A cache key consists of the query's bytes, the route, its parameters and the owner. The answer
depends only on these, on the catalogue files and on the stored calibrations. An entry is dropped
when a catalogue file changes, or when a calibration that it used has a newer version. Both are
checked at most once per second, and after this process fits a calibration. Queries that use
registered names are not cached.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hp_tool import catalog
from hp_tool.domain.records import JsonObject
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.problem import TrainingProblem
from service.http import asgi_body
from service.http.metrics import Metrics

MAX_BYTES = 64 * 2**20
MAX_ANSWER_BYTES = 2**20
ENTRY_OVERHEAD_BYTES = 8 * 1024
"""Memory per entry in addition to its body: 3 to 5 KiB for a resolved problem, and as much for
everything else.
"""
CHECK_EVERY_S = 1.0
ROUTES = {
    path: SimpleNamespace(path_format=path) for path in ("/v1/estimates", "/v1/recommendations")
}
"""Cached routes, in the form that the request log uses."""

PREFIX = "/v1/"
UNTAGGED = ("/v1/keys", "/v1/audit")
"""Routes whose responses clients must not cache."""
Key = tuple[str | None, str, bytes, bytes]
"""Owner, route, parameters, and digest of the query."""
Learnt = list[tuple[Calibrations, TrainingProblem, JsonObject | str | None]]
"""Calibrations that an answer looked up: the problem, and the calibration that was applied."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """A cached answer, and the data that it depends on."""

    body: bytes
    learnt: Learnt
    checked_at: float

    @property
    def num_bytes(self) -> int:
        """Approximate memory use."""
        return len(self.body) + (1 + len(self.learnt)) * ENTRY_OVERHEAD_BYTES


class AnswerCache:
    """A least-recently-used cache of answers. Use it on one event loop only."""

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._bytes = 0
        self._catalogue = catalog.revision()
        self._catalogue_checked_at = clock()
        self._recheck_after = -math.inf

    async def get(self, key: Key) -> bytes | None:
        """Return the answer; None if it is missing or outdated."""
        now = self._clock()
        if now - self._catalogue_checked_at > CHECK_EVERY_S:
            self._catalogue_checked_at = now
            if (revision := await run_in_threadpool(catalog.revision)) != self._catalogue:
                self._catalogue = revision
                self._entries.clear()
                self._bytes = 0
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.learnt and (
            now - entry.checked_at > CHECK_EVERY_S or entry.checked_at <= self._recheck_after
        ):
            if not await run_in_threadpool(_is_current, entry.learnt):
                self._drop(key)
                return None
            entry.checked_at = now
        if key in self._entries:  # Another request may have dropped the entry.
            self._entries.move_to_end(key)
        return entry.body

    def put(self, key: Key, body: bytes, *, learnt: Learnt) -> None:
        """Store an answer, unless it is so large that it would evict many others."""
        if len(body) > MAX_ANSWER_BYTES:
            return
        self._drop(key)
        entry = self._entries[key] = Entry(body=body, learnt=learnt, checked_at=self._clock())
        self._bytes += entry.num_bytes
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def recheck(self) -> None:
        """Check every entry at its next use, because there is a new calibration. Thread-safe."""
        self._recheck_after = self._clock()

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        self._bytes -= entry.num_bytes if entry else 0


def _is_current(learnt: Learnt) -> bool:
    return all(
        applied_calibration(calibrations, problem) == used for calibrations, problem, used in learnt
    )


def applied_calibration(
    calibrations: Calibrations, problem: TrainingProblem
) -> JsonObject | str | None:
    """Return the calibration used for a problem, as in the provenance, or why none was used."""
    predictor = calibrations(problem)
    return calibrations.unused(problem) if predictor is None else predictor.provenance


class CachedAnswers:
    """Middleware that returns cached answers, and caches the answers of ROUTES."""

    def __init__(self, app: ASGIApp, cache: AnswerCache, metrics: Metrics) -> None:
        self.app = app
        self.cache = cache
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            await self.app(scope, receive, send)
            return
        body = await asgi_body.read_body(receive)
        if body is None:  # The client disconnected.
            return
        path: str = scope["path"]
        owner = scope["state"]["principal"].owner  # The owner's own reports may affect the answer.
        key = (owner, path, scope["query_string"], hashlib.blake2b(body, digest_size=16).digest())
        cached = await self.cache.get(key)
        self.metrics.count_cached(route=path, hit=cached is not None)
        if cached is not None:
            scope["route"] = ROUTES[path]
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(cached)).encode()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": cached})
            return
        state = scope.setdefault("state", {})
        status = 0

        async def stored(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status == 200 and not message.get("more_body") and "by_owner" not in state:
                self.cache.put(key, message.get("body", b""), learnt=state.get("learnt", []))
            await send(message)

        await self.app(scope, asgi_body.replay_body(body, receive), stored)


class ETags:
    """Middleware that adds ETags to JSON responses of GET requests below /v1/."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        tagged = scope["type"] == "http" and scope["method"] == "GET" and path.startswith(PREFIX)
        if not tagged or path.startswith(UNTAGGED):
            await self.app(scope, receive, send)
            return
        start: Message | None = None

        async def conditional(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_json(message):
                start = message
                return
            if start is not None:
                message, start = (
                    _add_etag(start, message, Headers(scope=scope).get("if-none-match", "")),
                    None,
                )
                await send(message.pop("start"))
            await send(message)

        await self.app(scope, receive, conditional)


def _is_json(start: Message) -> bool:
    return (
        start["status"] == 200
        and dict(start["headers"]).get(b"content-type") == b"application/json"
    )


def _add_etag(start: Message, body: Message, known: str) -> Message:
    """Return the body message, with the start message and its ETag under `start`.

    If the ETag is in If-None-Match, the response is an empty 304.

    Args:
        start: Start message of the response.
        body: Body message.
        known: Value of If-None-Match.
    """
    if body.get("more_body"):
        return {**body, "start": start}
    tag = f'"{hashlib.blake2b(body.get("body", b""), digest_size=12).hexdigest()}"'
    headers = [*start["headers"], (b"etag", tag.encode()), (b"cache-control", b"private, no-cache")]
    if known.strip() != "*" and tag not in (
        part.strip().removeprefix("W/") for part in known.split(",")
    ):
        return {**body, "start": {**start, "headers": headers}}
    headers = [
        (name, value) for name, value in headers if name not in (b"content-length", b"content-type")
    ]
    return {
        "type": "http.response.body",
        "body": b"",
        "start": {**start, "status": 304, "headers": headers},
    }
