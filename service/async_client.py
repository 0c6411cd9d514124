"""Asynchronous version of `service.client.Client`, with the same methods, answers and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from hp_tool.errors import StoreError
from service.api.views import EventView
from service.client import EventStream, client_settings
from service.clients import httpx
from service.clients.calls import Call, JsonObject, raise_problem, require_result, unreachable_error
from service.clients.endpoints import Endpoints
from service.clients.retries import MAX_UNREACHABLE_S, AsyncRetryTransport, ReconnectPolicy

T = TypeVar("T")


class AsyncClient(Endpoints):
    """A connection to a service, which any number of tasks on one event loop may share."""

    def __init__(
        self,
        *,
        server: str,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        base_url, headers = client_settings(server=server, api_key=api_key)
        retrying = AsyncRetryTransport(transport or httpx.AsyncHTTPTransport())
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout_s, transport=retrying
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Return the answer to a call."""
        try:
            return call.read(await self._http.send(call.request(self._http)))
        except httpx.TransportError as error:
            raise unreachable_error(self._http.base_url, error) from error

    async def events(
        self, *, search_id: str, after: int = 0, patience_s: float = MAX_UNREACHABLE_S
    ) -> AsyncGenerator[EventView]:
        """Yield each event of the search after number `after` once, until the search ends.

        Reconnects as often as necessary.

        Raises:
            StoreError: The server is unreachable for `patience_s` seconds.
        """
        reconnects = ReconnectPolicy(patience_s=patience_s)
        while True:
            stream = EventStream(search_id=search_id, after=after)
            try:
                async with aclosing(self._connected(stream, reconnects)) as events:
                    async for event in events:
                        yield event
                if stream.ended:
                    return
                connection_error = unreachable_error(self._http.base_url, "the stream was cut off")
            except StoreError as error:
                connection_error = error
            after = stream.after
            await asyncio.sleep(reconnects.wait_s(connection_error))

    async def _connected(
        self, stream: EventStream, reconnects: ReconnectPolicy
    ) -> AsyncGenerator[EventView]:
        try:
            response = await self._http.send(stream.call.request(self._http), stream=True)
            try:
                if not response.is_success:
                    await response.aread()
                    raise_problem(response)
                reconnects.connected()
                async for chunk in response.aiter_bytes():
                    for event in stream.feed(chunk):
                        yield event
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise unreachable_error(self._http.base_url, error) from error

    async def wait(
        self,
        *,
        search_id: str,
        on_event: Callable[[EventView], object] = lambda event: None,
        patience_s: float = MAX_UNREACHABLE_S,
    ) -> JsonObject:
        """Wait for a search to end and return its result.

        Survives lost connections and server restarts.

        Raises:
            HpToolError: As in `Client.wait`.
            StoreError: As in `Client.wait`.
        """
        last_seq, reconnects = 0, ReconnectPolicy(patience_s=patience_s)
        while True:
            async with aclosing(
                self.events(search_id=search_id, after=last_seq, patience_s=patience_s)
            ) as events:
                async for event in events:
                    last_seq = event.seq
                    on_event(event)
            try:
                result = await self.result(search_id=search_id, wait_s=10.0)
            except StoreError as error:
                await asyncio.sleep(reconnects.wait_s(error))
                continue
            reconnects.connected()
            if result is not None:
                return require_result(result)
