"""`service.client.Client` for an event loop: the same calls, answers and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import httpx

from hp_tool.errors import StoreError
from service import endpoints
from service.api.views import EventView, MeasurementView, PageView, RegistrationView, SearchView, TrialsView, WebhookView
from service.client import connection
from service.endpoints import Call, JsonObject
from service.retries import PATIENCE_S, AsyncRetryTransport, ReconnectPolicy

T = TypeVar("T")


class AsyncClient:
    """A connection to one service, for any number of tasks of one loop. Each method does what its twin does."""

    def __init__(
        self,
        *,
        server: str,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        options = connection(server=server, api_key=api_key, timeout_s=timeout_s)
        self._http = httpx.AsyncClient(**options, transport=AsyncRetryTransport(transport or httpx.AsyncHTTPTransport()))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def estimate(self, *, query: Mapping[str, Any]) -> JsonObject:
        return await self._do(endpoints.estimate(query=query))

    async def recommend(self, *, query: Mapping[str, Any], top: int = 10) -> JsonObject:
        return await self._do(endpoints.recommend(query=query, top=top))

    async def size(self, *, query: Mapping[str, Any]) -> JsonObject:
        return await self._do(endpoints.size(query=query))

    async def submit_search(
        self,
        *,
        query: Mapping[str, Any],
        idempotency_key: str | None = None,
        webhook: str | None = None,
        priority: int = 0,
    ) -> SearchView:
        call = endpoints.submit_search(query=query, idempotency_key=idempotency_key, webhook=webhook, priority=priority)
        return await self._do(call)

    async def webhook(self, *, search_id: str) -> WebhookView:
        return await self._do(endpoints.webhook(search_id=search_id))

    async def searches(self, **filters: Any) -> PageView[SearchView]:
        return await self._do(endpoints.searches(**filters))

    async def search(self, *, search_id: str) -> SearchView:
        return await self._do(endpoints.search(search_id=search_id))

    async def trials(self, *, search_id: str, **filters: Any) -> TrialsView:
        return await self._do(endpoints.trials(search_id=search_id, **filters))

    async def act(self, *, search_id: str, action: str) -> SearchView:
        """`action`: cancel, pause, resume or clone."""
        return await self._do(endpoints.act(search_id=search_id, action=action))

    async def change_budget(
        self, *, search_id: str, budget_runs: int | None = None, budget_gpu_seconds: float | None = None
    ) -> SearchView:
        budget = {"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds}
        return await self._do(endpoints.change_budget(search_id=search_id, **budget))

    async def result(self, *, search_id: str, wait_s: float = 0.0) -> JsonObject | None:
        call = endpoints.result(search_id=search_id, wait_s=wait_s)
        response = await self._send(call)
        return None if response.status_code == httpx.codes.ACCEPTED else call.read(response)

    async def events(self, *, search_id: str, after: int = 0, patience_s: float = PATIENCE_S) -> AsyncGenerator[EventView]:
        absence = ReconnectPolicy(patience_s=patience_s)
        while True:
            stream = endpoints.EventStream()
            try:
                connection = self._events(endpoints.events(search_id=search_id, after=after), stream, absence)
                async with aclosing(connection) as events:
                    async for event in events:
                        after = event.seq
                        yield event
                if stream.ended:
                    return
                lost = endpoints.unreachable(self._http.base_url, "the stream was cut off")
            except StoreError as error:
                lost = error
            await asyncio.sleep(absence.wait_s(lost))

    async def _events(
        self, call: Call[EventView], stream: endpoints.EventStream, absence: ReconnectPolicy
    ) -> AsyncGenerator[EventView]:
        try:
            async with self._http.stream(call.method, call.path, **call.options) as response:
                if not response.is_success:
                    await response.aread()
                    endpoints.raise_problem(response)
                absence.over()
                async for chunk in response.aiter_bytes():
                    for event in stream.feed(chunk):
                        yield event
        except httpx.TransportError as error:
            raise endpoints.unreachable(self._http.base_url, error) from error

    async def wait(
        self,
        *,
        search_id: str,
        on_event: Callable[[EventView], object] = lambda event: None,
        patience_s: float = PATIENCE_S,
    ) -> JsonObject:
        seen, absence = 0, ReconnectPolicy(patience_s=patience_s)
        while True:
            async with aclosing(self.events(search_id=search_id, after=seen, patience_s=patience_s)) as events:
                async for event in events:
                    seen = event.seq
                    on_event(event)
            try:
                result = await self.result(search_id=search_id, wait_s=10.0)
            except StoreError as error:
                await asyncio.sleep(absence.wait_s(error))
                continue
            absence.over()
            if result is not None:
                return endpoints.with_result(result)

    async def report_measurement(self, *, report: Mapping[str, Any], idempotency_key: str | None = None) -> MeasurementView:
        return await self._do(endpoints.report_measurement(report=report, idempotency_key=idempotency_key))

    async def measurements(self, **filters: Any) -> PageView[MeasurementView]:
        return await self._do(endpoints.measurements(**filters))

    async def catalog(self, *, kind: str) -> JsonObject:
        return await self._do(endpoints.catalog(kind=kind))

    async def register(self, *, kind: str, name: str, spec: Mapping[str, Any], shared: bool = False) -> RegistrationView:
        return await self._do(endpoints.register(kind=kind, name=name, spec=spec, shared=shared))

    async def _do(self, call: Call[T]) -> T:
        return call.read(await self._send(call))

    async def _send(self, call: Call[Any]) -> httpx.Response:
        try:
            return await self._http.request(call.method, call.path, **call.options)
        except httpx.TransportError as error:
            raise endpoints.unreachable(self._http.base_url, error) from error
