"""The service as a Python object: typed answers, and the same errors that the library raises.

with Client(server="http://127.0.0.1:8000") as client:
    search = client.submit_search(query=query)
    result = client.wait(search_id=search.id, on_event=print)
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar, cast

import httpx
from pydantic import TypeAdapter, ValidationError

from hp_tool import schema
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
from service.api.ndjson import MEDIA_TYPE as NDJSON
from service.api.views import EventView, MeasurementView, PageView, SearchView, TrialsView
from service.patience import Patient
from service.settings import read_secret

JsonObject = dict[str, Any]
T = TypeVar("T")

BATCH_LINES = 256
BATCH_BYTES = 1 << 16
"""What one request of a batch holds: small beside what sockets buffer."""
MAX_WAIT_S = 60.0
"""For a server that says when a key may ask again."""

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


class Client:
    """A connection to one service. Not for use by several threads at once."""

    def __init__(
        self, *, server: str, api_key: str | None = None, timeout_s: float = 30.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        """`server`: base URL. `api_key`: default HP_API_KEY, or the file that HP_API_KEY_FILE names.

        `transport`: for tests that need no socket.
        """
        if not server.startswith(("http://", "https://")):
            raise InputError(f"{server!r} is not an http(s) URL", field="server")
        key = api_key if api_key is not None else read_secret(os.environ, "HP_API_KEY")
        self._http = httpx.Client(
            base_url=server.rstrip("/"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            transport=Patient(transport or httpx.HTTPTransport(retries=2)),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        self._http.close()

    def estimate(self, *, query: Mapping[str, Any]) -> JsonObject:
        """{id, status, estimate} for the query's one configuration."""
        return self._object("POST", "/v1/estimates", json=query)

    def recommend(self, *, query: Mapping[str, Any], top: int = 10) -> JsonObject:
        """{id, status, recommendations, space, rejections}, best first."""
        return self._object("POST", "/v1/recommendations", json=query, params={"top": top})

    def size(self, *, query: Mapping[str, Any]) -> JsonObject:
        """{id, status, sizing}: the training that a budget buys."""
        return self._object("POST", "/v1/sizings", json=query)

    def batch(
        self, *, lines: Iterable[bytes], task: str = "estimate", top: int = 10, calibration: bool = True
    ) -> Iterator[str]:
        """One answer line per query line, in order, as they come; neither side holds the whole.

        Lines go in requests of few: one that the server answers before it was sent to its end would fill the buffers between
        the two, and each would wait for the other to read.
        """
        params: dict[str, str | int] = {"task": task, "top": top, "calibration": "true" if calibration else "false"}
        for content in _requests(lines):
            due = content.count(b"\n")
            while wait_s := (yield from self._batch(content, params=params, due=due)):
                time.sleep(wait_s)

    def _batch(self, content: bytes, *, params: Mapping[str, str | int], due: int) -> Generator[str, None, float]:
        """The answers to one request; returns the seconds to wait where the key has asked too often, and was not answered."""
        headers = {"Content-Type": NDJSON}
        try:
            with self._http.stream("POST", "/v1/batch", params=params, content=content, headers=headers) as response:
                if response.status_code == 429:
                    return min(float(response.headers.get("Retry-After", 1.0)), MAX_WAIT_S)
                _raise(response)
                number = 0
                for answer in response.iter_lines():
                    yield answer
                    number += 1
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if number != due:
            raise HpToolError(f"the server answered {number} of {due} lines", code="bad_answer")
        return 0.0

    def submit_search(self, *, query: Mapping[str, Any], idempotency_key: str | None = None) -> SearchView:
        """Queue a search. Sending the same key again answers the same search, so a lost answer is no second search."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return _read(SearchView, self._send("POST", "/v1/searches", json=query, headers=headers))

    def searches(self, *, state: str | None = None, limit: int = 50, cursor: str | None = None) -> PageView[SearchView]:
        """A page of searches, newest first."""
        params = {"state": state, "limit": limit, "cursor": cursor}
        return _read(PageView[SearchView], self._send("GET", "/v1/searches", params=params))

    def search(self, *, search_id: str) -> SearchView:
        """Where one search stands."""
        return _read(SearchView, self._send("GET", f"/v1/searches/{search_id}"))

    def trials(self, *, search_id: str) -> TrialsView:
        """Its profile runs, predicted and measured side by side."""
        return _read(TrialsView, self._send("GET", f"/v1/searches/{search_id}/trials"))

    def cancel(self, *, search_id: str) -> SearchView:
        """Ask its worker to stop for good."""
        return self._act(search_id, "cancel")

    def pause(self, *, search_id: str) -> SearchView:
        """Ask its worker to let go until `resume`."""
        return self._act(search_id, "pause")

    def resume(self, *, search_id: str) -> SearchView:
        """Queue a paused or failed search again."""
        return self._act(search_id, "resume")

    def clone(self, *, search_id: str) -> SearchView:
        """A new search with the same query."""
        return self._act(search_id, "clone")

    def result(self, *, search_id: str, wait_s: float = 0.0) -> JsonObject | None:
        """The ended search's result, waiting up to wait_s seconds for it; None: not ended yet."""
        response = self._send("GET", f"/v1/searches/{search_id}/result", params={"wait_s": wait_s}, timeout=wait_s + 30.0)
        return None if response.status_code == 202 else _read(JsonObject, response)

    def events(self, *, search_id: str, after: int = 0) -> Iterator[EventView]:
        """Its events after seq `after`, live until it ends. A dropped connection raises httpx.TransportError."""
        url, headers = f"/v1/searches/{search_id}/events", {"Last-Event-ID": str(after)}
        # The service pings every 15 s; a longer silence is a dead connection.
        timeout = httpx.Timeout(self._http.timeout.connect, read=60.0)
        with self._http.stream("GET", url, headers=headers, timeout=timeout) as response:
            _raise(response)
            name = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: ") and not name:
                    yield _parse(EventView, line.removeprefix("data: "))
                elif not line:
                    name = ""

    def wait(self, *, search_id: str, on_event: Callable[[EventView], object] = lambda event: None) -> JsonObject:
        """Follow a search to its end and return its result; survives dropped connections without losing an event.

        Raises HpToolError where the search ended without any result, as it would have in this process.
        """
        seen = 0
        while True:
            try:
                for event in self.events(search_id=search_id, after=seen):
                    seen = event.seq
                    on_event(event)
            except httpx.TransportError:
                pass  # fall through to the result, which waits and so keeps us from spinning
            result = self.result(search_id=search_id, wait_s=10.0)
            if result is not None:
                return _with_result(result)

    def report_measurement(self, *, report: Mapping[str, Any], idempotency_key: str | None = None) -> MeasurementView:
        """Tell what a real training measured: {query, parallel, measurement}."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return _read(MeasurementView, self._send("POST", "/v1/measurements", json=report, headers=headers))

    def measurements(self, *, limit: int = 100, cursor: str | None = None, **filters: str) -> PageView[MeasurementView]:
        """Stored measurements, newest first; filters: gpu, model, framework, source, status, search_id."""
        params = {"limit": limit, "cursor": cursor, **filters}
        return _read(PageView[MeasurementView], self._send("GET", "/v1/measurements", params=params))

    def catalog(self, *, kind: str) -> JsonObject:
        """What `models`, `gpus` or `clusters` there are."""
        return self._object("GET", f"/v1/{kind}")

    def _act(self, search_id: str, action: str) -> SearchView:
        return _read(SearchView, self._send("POST", f"/v1/searches/{search_id}/{action}"))

    def _object(self, method: str, path: str, **options: Any) -> JsonObject:
        return _read(JsonObject, self._send(method, path, **options))

    def _send(self, method: str, path: str, *, params: Mapping[str, Any] | None = None, **options: Any) -> httpx.Response:
        given = {name: value for name, value in (params or {}).items() if value is not None}
        try:
            response = self._http.request(method, path, params=given, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _raise(response)
        return response

    def _unreachable(self, error: httpx.TransportError) -> StoreError:
        return StoreError(f"{self._http.base_url} does not answer: {error}", field="server", code="server_unreachable")


def _requests(lines: Iterable[bytes]) -> Iterator[bytes]:
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


def _with_result(answer: JsonObject) -> JsonObject:
    """The answer, unless it is only an error. A failed search that ran something has both, and is answered."""
    if "recommendations" in answer:
        return answer
    error = answer["error"]
    kind = ERROR_BY_CODE.get(error["code"], HpToolError)
    raise kind(error["message"], code=error["code"], field=error.get("field"))


def _raise(response: httpx.Response) -> None:
    """The library's error that a problem+json stands for."""
    if response.is_success:
        return
    response.read()
    kind = ERROR_BY_STATUS.get(response.status_code, HpToolError)
    try:
        body = response.json()
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            wait_s = float(response.headers["Retry-After"])
            raise LimitError(body["detail"], code=body["code"], field=body.get("field"), retry_after_s=wait_s)
        raise kind(body["detail"], code=body["code"], field=body.get("field"))
    except (ValueError, KeyError, TypeError):
        raise kind(f"{response.url} answered {response.status_code} {response.reason_phrase}", code="http_error") from None


def _parse(kind: type[T], text: str | bytes) -> T:
    adapter: TypeAdapter[T] = schema.adapter(cast(Any, kind))
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise HpToolError(f"the server's answer is not understood: {error.errors()[0]['msg']}", code="bad_answer") from error


def _read(kind: type[T], response: httpx.Response) -> T:
    return _parse(kind, response.content)
