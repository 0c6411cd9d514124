"""Requests to the service as data, and their answers as types: what the client and its asynchronous twin have in common."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import httpx
from pydantic import TypeAdapter, ValidationError

from hp_tool.errors import (
    ConflictError,
    HpToolError,
    InputError,
    LauncherError,
    LimitError,
    MissingExtraError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from hp_tool.queries import schema
from service.api.views import (
    STREAM_END,
    EventView,
    MeasurementView,
    PageView,
    RegistrationView,
    SearchView,
    TrialsView,
    WebhookView,
)
from service.retries import AWAY

JsonObject = dict[str, Any]
T = TypeVar("T")

BATCH_LINES = 256
BATCH_BYTES = 1 << 16
"""What one request of a batch holds: small beside what sockets buffer."""
SILENCE_S = 60.0
"""The service pings an event stream every 15 s; a longer silence is a dead connection."""

ERROR_BY_STATUS: dict[int, type[HpToolError]] = {
    401: InputError,
    403: InputError,
    404: NotFoundError,
    409: ConflictError,
    413: InputError,
    422: InputError,
    501: MissingExtraError,
    502: LauncherError,
    503: StoreError,
}
ERROR_BY_CODE: dict[str, type[HpToolError]] = {
    **{kind.code: kind for kind in (InputError, NotFoundError, UnsupportedError, ConflictError, LauncherError, StoreError)},
    "launcher_mismatch": InputError,
    "cancelled": ConflictError,
}
"""A search that failed stores its error's code; only the codes tell the kinds apart again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request, and what its answer is read as."""

    method: str
    path: str
    answer: type[T]
    options: dict[str, Any] = field(default_factory=dict)
    """httpx's: json, params, headers, timeout."""

    def read(self, response: httpx.Response) -> T:
        """The answer; raises what the problem in its place stands for."""
        raise_problem(response)
        return parsed(self.answer, response.content)


def estimate(*, query: Mapping[str, Any]) -> Call[JsonObject]:
    return Call(method="POST", path="/v1/estimates", answer=JsonObject, options={"json": query})


def recommend(*, query: Mapping[str, Any], top: int) -> Call[JsonObject]:
    return Call(method="POST", path="/v1/recommendations", answer=JsonObject, options={"json": query, "params": {"top": top}})


def size(*, query: Mapping[str, Any]) -> Call[JsonObject]:
    return Call(method="POST", path="/v1/sizings", answer=JsonObject, options={"json": query})


def submit_search(
    *, query: Mapping[str, Any], idempotency_key: str | None, webhook: str | None, priority: int
) -> Call[SearchView]:
    params = _given({"webhook": webhook, "priority": priority or None})
    options = {"json": query, "headers": _once(idempotency_key), "params": params}
    return Call(method="POST", path="/v1/searches", answer=SearchView, options=options)


def webhook(*, search_id: str) -> Call[WebhookView]:
    return Call(method="GET", path=f"/v1/searches/{search_id}/webhook", answer=WebhookView)


def searches(**filters: Any) -> Call[PageView[SearchView]]:
    return Call(method="GET", path="/v1/searches", answer=PageView[SearchView], options={"params": _given(filters)})


def search(*, search_id: str) -> Call[SearchView]:
    return Call(method="GET", path=f"/v1/searches/{search_id}", answer=SearchView)


def trials(*, search_id: str, **filters: Any) -> Call[TrialsView]:
    options = {"params": _given(filters)}
    return Call(method="GET", path=f"/v1/searches/{search_id}/trials", answer=TrialsView, options=options)


def act(*, search_id: str, action: str) -> Call[SearchView]:
    """An action sent twice does as much as one; a clone is made once."""
    headers = _once(None) if action == "clone" else {}
    return Call(method="POST", path=f"/v1/searches/{search_id}/{action}", answer=SearchView, options={"headers": headers})


def change_budget(*, search_id: str, **budget: float | None) -> Call[SearchView]:
    return Call(method="PATCH", path=f"/v1/searches/{search_id}", answer=SearchView, options={"json": _given(budget)})


def result(*, search_id: str, wait_s: float) -> Call[JsonObject]:
    options = {"params": {"wait_s": wait_s}, "timeout": wait_s + 30.0}
    return Call(method="GET", path=f"/v1/searches/{search_id}/result", answer=JsonObject, options=options)


def report_measurement(*, report: Mapping[str, Any], idempotency_key: str | None) -> Call[MeasurementView]:
    options = {"json": report, "headers": _once(idempotency_key)}
    return Call(method="POST", path="/v1/measurements", answer=MeasurementView, options=options)


def measurements(**filters: Any) -> Call[PageView[MeasurementView]]:
    return Call(method="GET", path="/v1/measurements", answer=PageView[MeasurementView], options={"params": _given(filters)})


def catalog(*, kind: str) -> Call[JsonObject]:
    return Call(method="GET", path=f"/v1/{kind}", answer=JsonObject)


def register(*, kind: str, name: str, spec: Mapping[str, Any], shared: bool) -> Call[RegistrationView]:
    body = {"name": name, "spec": spec, "shared": shared}
    return Call(method="POST", path=f"/v1/{kind}", answer=RegistrationView, options={"json": body})


def events(*, search_id: str, after: int) -> Call[EventView]:
    """A stream; `EventStream` reads it."""
    options = {"headers": {"Last-Event-ID": str(after)}, "timeout": httpx.Timeout(30.0, read=SILENCE_S)}
    return Call(method="GET", path=f"/v1/searches/{search_id}/events", answer=EventView, options=options)


class Lines:
    """The lines of a stream as it arrives. httpx's own are also cut at separators that JSON may hold within a line (U+2028)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode() for line in whole]


class EventStream:
    """Reads server-sent events as they arrive."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._name = ""
        self.ended = False
        """The search has, and so has the stream; one that stops without it was cut off."""

    def feed(self, chunk: bytes) -> Iterator[EventView]:
        """The events that `chunk` completes."""
        for line in self._lines.feed(chunk):
            if (event := self._read(line)) is not None:
                yield event

    def _read(self, line: str) -> EventView | None:
        """The event that this line tells, if it does; named ones (the stream's end) tell nothing of the search."""
        if line.startswith("event: "):
            self._name = line.removeprefix("event: ")
            self.ended = self._name == STREAM_END
        elif line.startswith("data: ") and not self._name:
            return parsed(EventView, line.removeprefix("data: "))
        elif not line:
            self._name = ""
        return None


def batches(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines in bodies of at most BATCH_LINES lines, closed at the line that brings them to BATCH_BYTES."""
    body, count = bytearray(), 0
    for line in lines:
        if not line.strip():  # has no answer
            continue
        body += line.rstrip(b"\n") + b"\n"
        count += 1
        if count == BATCH_LINES or len(body) >= BATCH_BYTES:
            yield bytes(body)
            body, count = bytearray(), 0
    if body:
        yield bytes(body)


def with_result(answer: JsonObject) -> JsonObject:
    """The answer, unless it is only an error. A failed search that ran something has both, and is answered."""
    if "recommendations" in answer:
        return answer
    error = answer["error"]
    kind = ERROR_BY_CODE.get(error["code"], HpToolError)
    raise kind(error["message"], code=error["code"], field=error.get("field"))


def unreachable(server: object, error: httpx.TransportError | str) -> StoreError:
    return StoreError(f"{server} does not answer: {error}", field="server", code="server_unreachable")


def raise_problem(response: httpx.Response) -> None:
    """Raise the problem of an answer that was read, as the library would have raised it here."""
    if response.is_success:
        return
    kind = ERROR_BY_STATUS.get(response.status_code, HpToolError)
    try:
        body = response.json()
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            wait_s = float(response.headers["Retry-After"])
            raise LimitError(body["detail"], code=body["code"], field=body.get("field"), retry_after_s=wait_s)
        raise kind(body["detail"], code=body["code"], field=body.get("field"))
    except (ValueError, KeyError, TypeError):
        if response.status_code in AWAY:  # in a proxy's words, which finds nobody behind it
            kind = StoreError
        raise kind(f"{response.url} answered {response.status_code} {response.reason_phrase}", code="http_error") from None


def parsed(kind: type[T], text: str | bytes) -> T:
    """An answer as its type. HpToolError where the server speaks another language."""
    adapter: TypeAdapter[T] = schema.adapter(cast(Any, kind))
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise HpToolError(f"the server's answer is not understood: {error.errors()[0]['msg']}", code="bad_answer") from error


def _once(idempotency_key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}


def _given(values: Mapping[str, Any]) -> JsonObject:
    return {name: value for name, value in values.items() if value is not None}
