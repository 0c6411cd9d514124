"""The service as a Python object: typed answers, and the same errors that the library raises.

with Client(server="http://127.0.0.1:8000") as client:
    search = client.submit_search(query=query)
    result = client.wait(search_id=search.id, on_event=print)

`service.async_client.AsyncClient` is the same for an event loop. Answers that get lost are asked for again where that does no
harm, and a key that asks too often waits as long as it is told (`service.retries`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import httpx

from hp_tool.errors import HpToolError, InputError, StoreError
from service import endpoints
from service.api.ndjson import MEDIA_TYPE as NDJSON
from service.api.views import EventView, MeasurementView, PageView, RegistrationView, SearchView, TrialsView, WebhookView
from service.endpoints import BATCH_BYTES, BATCH_LINES, Call, JsonObject
from service.retries import PATIENCE_S, ReconnectPolicy, RetryTransport
from service.settings import read_secret

__all__ = ["BATCH_BYTES", "BATCH_LINES", "Client"]
T = TypeVar("T")


def connection(*, server: str, api_key: str | None, timeout_s: float) -> JsonObject:
    """httpx's options of a client. `api_key` defaults to HP_API_KEY, or the file that HP_API_KEY_FILE names."""
    if not server.startswith(("http://", "https://")):
        raise InputError(f"{server!r} is not an http(s) URL", field="server")
    key = api_key if api_key is not None else read_secret(os.environ, "HP_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"base_url": server.rstrip("/"), "headers": headers, "timeout": timeout_s}


class Client:
    """A connection to one service. Not for use by several threads at once."""

    def __init__(
        self, *, server: str, api_key: str | None = None, timeout_s: float = 30.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        """`server`: base URL. `api_key`: default HP_API_KEY. `transport`: for tests that need no socket."""
        options = connection(server=server, api_key=api_key, timeout_s=timeout_s)
        self._http = httpx.Client(**options, transport=RetryTransport(transport or httpx.HTTPTransport()))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        self._http.close()

    def estimate(self, *, query: Mapping[str, Any]) -> JsonObject:
        """{id, status, estimate} for the query's one configuration."""
        return self._do(endpoints.estimate(query=query))

    def recommend(self, *, query: Mapping[str, Any], top: int = 10) -> JsonObject:
        """{id, status, recommendations, space, rejections}, best first."""
        return self._do(endpoints.recommend(query=query, top=top))

    def size(self, *, query: Mapping[str, Any]) -> JsonObject:
        """{id, status, sizing}: the training that a budget buys."""
        return self._do(endpoints.size(query=query))

    def batch(
        self, *, lines: Iterable[bytes], task: str = "estimate", top: int = 10, calibration: bool = True
    ) -> Iterator[str]:
        """One answer line per query line, in order, as they come; neither side holds the whole.

        Lines go in requests of few: one that the server answers before it was sent to its end would fill the buffers between
        the two, and each would wait for the other to read.
        """
        params: dict[str, str | int] = {"task": task, "top": top, "calibration": "true" if calibration else "false"}
        for content in endpoints.batches(lines):
            yield from self._batch(content, params=params, due=content.count(b"\n"))

    def _batch(self, content: bytes, *, params: Mapping[str, str | int], due: int) -> Iterator[str]:
        """The answers to one request."""
        headers = {"Content-Type": NDJSON}
        number = 0
        try:
            with self._http.stream("POST", "/v1/batch", params=params, content=content, headers=headers) as response:
                self._check(response)
                lines = endpoints.Lines()
                for chunk in response.iter_bytes():
                    for answer in lines.feed(chunk):
                        yield answer
                        number += 1
        except httpx.TransportError as error:
            raise endpoints.unreachable(self._http.base_url, error) from error
        if number != due:
            raise HpToolError(f"the server answered {number} of {due} lines", code="bad_answer")

    def submit_search(
        self,
        *,
        query: Mapping[str, Any],
        idempotency_key: str | None = None,
        webhook: str | None = None,
        priority: int = 0,
    ) -> SearchView:
        """Queue a search. Sending the same key again answers the same search, so a lost answer is no second search.

        `priority`: -100 to 100, higher goes first; above 0 for administrators.
        `webhook`: https URL that is told when it ends; `service.webhooks.verify` tells the service's messages from others'.
        """
        call = endpoints.submit_search(query=query, idempotency_key=idempotency_key, webhook=webhook, priority=priority)
        return self._do(call)

    def webhook(self, *, search_id: str) -> WebhookView:
        """How far the telling of its end has come."""
        return self._do(endpoints.webhook(search_id=search_id))

    def searches(
        self, *, state: str | None = None, limit: int = 50, cursor: str | None = None, **filters: str
    ) -> PageView[SearchView]:
        """A page of searches, newest first; filters: owner, since, until, order."""
        return self._do(endpoints.searches(state=state, limit=limit, cursor=cursor, **filters))

    def search(self, *, search_id: str) -> SearchView:
        """Where one search stands."""
        return self._do(endpoints.search(search_id=search_id))

    def trials(self, *, search_id: str, limit: int | None = None, cursor: str | None = None, **filters: str) -> TrialsView:
        """Its profile runs, predicted and measured side by side; filters: state, status, since, until, order."""
        return self._do(endpoints.trials(search_id=search_id, limit=limit, cursor=cursor, **filters))

    def cancel(self, *, search_id: str) -> SearchView:
        """Ask its worker to stop for good."""
        return self._do(endpoints.act(search_id=search_id, action="cancel"))

    def pause(self, *, search_id: str) -> SearchView:
        """Ask its worker to let go until `resume`."""
        return self._do(endpoints.act(search_id=search_id, action="pause"))

    def resume(self, *, search_id: str) -> SearchView:
        """Queue a paused or failed search again."""
        return self._do(endpoints.act(search_id=search_id, action="resume"))

    def clone(self, *, search_id: str) -> SearchView:
        """A new search with the same query."""
        return self._do(endpoints.act(search_id=search_id, action="clone"))

    def change_budget(
        self, *, search_id: str, budget_runs: int | None = None, budget_gpu_seconds: float | None = None
    ) -> SearchView:
        """Let it spend more or less from now on."""
        budget = {"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds}
        return self._do(endpoints.change_budget(search_id=search_id, **budget))

    def result(self, *, search_id: str, wait_s: float = 0.0) -> JsonObject | None:
        """The ended search's result, waiting up to wait_s seconds for it; None: not ended yet."""
        call = endpoints.result(search_id=search_id, wait_s=wait_s)
        response = self._send(call)
        return None if response.status_code == httpx.codes.ACCEPTED else call.read(response)

    def events(self, *, search_id: str, after: int = 0, patience_s: float = PATIENCE_S) -> Iterator[EventView]:
        """Its events after seq `after`, each once, live until it ends, over as many connections as it takes.

        Raises StoreError where the server is away for `patience_s`.
        """
        absence = ReconnectPolicy(patience_s=patience_s)
        while True:
            stream = endpoints.EventStream()
            try:
                for event in self._events(endpoints.events(search_id=search_id, after=after), stream, absence):
                    after = event.seq
                    yield event
                if stream.ended:
                    return
                lost = endpoints.unreachable(self._http.base_url, "the stream was cut off")
            except StoreError as error:
                lost = error
            time.sleep(absence.wait_s(lost))

    def _events(self, call: Call[EventView], stream: endpoints.EventStream, absence: ReconnectPolicy) -> Iterator[EventView]:
        """The events of one connection."""
        try:
            with self._http.stream(call.method, call.path, **call.options) as response:
                self._check(response)
                absence.over()
                for chunk in response.iter_bytes():
                    yield from stream.feed(chunk)
        except httpx.TransportError as error:
            raise endpoints.unreachable(self._http.base_url, error) from error

    def wait(
        self,
        *,
        search_id: str,
        on_event: Callable[[EventView], object] = lambda event: None,
        patience_s: float = PATIENCE_S,
    ) -> JsonObject:
        """Follow a search to its end and return its result, though connections break and the server restarts meanwhile.

        Raises HpToolError where the search ended without any result, as it would have in this process, and StoreError where
        the server is away for `patience_s`.
        """
        seen, absence = 0, ReconnectPolicy(patience_s=patience_s)
        while True:
            for event in self.events(search_id=search_id, after=seen, patience_s=patience_s):
                seen = event.seq
                on_event(event)
            try:
                result = self.result(search_id=search_id, wait_s=10.0)
            except StoreError as error:
                time.sleep(absence.wait_s(error))
                continue
            absence.over()
            if result is not None:
                return endpoints.with_result(result)

    def report_measurement(self, *, report: Mapping[str, Any], idempotency_key: str | None = None) -> MeasurementView:
        """Tell what a real training measured: {query, parallel, measurement}."""
        return self._do(endpoints.report_measurement(report=report, idempotency_key=idempotency_key))

    def measurements(self, *, limit: int = 100, cursor: str | None = None, **filters: str) -> PageView[MeasurementView]:
        """Stored measurements, newest first; filters: gpu, model, framework, source, status, search_id, since, until, order."""
        return self._do(endpoints.measurements(limit=limit, cursor=cursor, **filters))

    def catalog(self, *, kind: str) -> JsonObject:
        """What `models`, `gpus` or `clusters` there are."""
        return self._do(endpoints.catalog(kind=kind))

    def register(self, *, kind: str, name: str, spec: Mapping[str, Any], shared: bool = False) -> RegistrationView:
        """Make one of `models` or `clusters` known by a name."""
        return self._do(endpoints.register(kind=kind, name=name, spec=spec, shared=shared))

    def _do(self, call: Call[T]) -> T:
        return call.read(self._send(call))

    def _send(self, call: Call[Any]) -> httpx.Response:
        try:
            return self._http.request(call.method, call.path, **call.options)
        except httpx.TransportError as error:
            raise endpoints.unreachable(self._http.base_url, error) from error

    def _check(self, response: httpx.Response) -> None:
        """Raise the problem of a stream that is none."""
        if not response.is_success:
            response.read()
            endpoints.raise_problem(response)
