"""A client of the service with typed answers, which raises the same errors as the library.

with Client(server="http://127.0.0.1:8000") as client:
    search = client.submit_search(query=query) result = client.wait(search_id=search.id,
    on_event=print)

`service.async_client.AsyncClient` does the same for an event loop. `service.clients.endpoints`
declares the methods of both. `service.clients.retries` decides which requests are sent again after
a lost answer or a rate limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from hp_tool.errors import HpToolError, InputError, StoreError
from service.api.views import NDJSON, STREAM_END, EventView
from service.clients import httpx
from service.clients.calls import (
    Call,
    JsonObject,
    parse_response,
    raise_problem,
    require_result,
    unreachable_error,
)
from service.clients.endpoints import Endpoints, path_segment
from service.clients.retries import MAX_UNREACHABLE_S, ReconnectPolicy, RetryTransport
from service.settings import read_secret

T = TypeVar("T")
BATCH_LINES = 256
BATCH_BYTES = 1 << 16
"""Maximum size of a batch request in bytes. It is small compared with socket buffers."""
SILENCE_S = 60.0
"""Seconds without data after which an event stream counts as dead. The service sends data every 15
s.
"""


def client_settings(*, server: str, api_key: str | None) -> tuple[str, dict[str, str]]:
    """Return the base URL and the headers of a client.

    `api_key` defaults to HP_API_KEY, or to the content of the file that HP_API_KEY_FILE names.
    """
    if not server.startswith(("http://", "https://")):
        raise InputError(f"{server!r} is not an http(s) URL", field="server")
    key = api_key if api_key is not None else read_secret(os.environ, "HP_API_KEY")
    return server.rstrip("/"), {"Authorization": f"Bearer {key}"} if key else {}


class Lines:
    """Splits a stream into lines.

    httpx would also split at separators that JSON may contain within a line (U+2028).
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the lines that `chunk` completes."""
        *complete, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode() for line in complete]


class EventStream:
    """Parses the server-sent events of one connection."""

    def __init__(self, *, search_id: str, after: int) -> None:
        """Create the parser.

        Args:
            after: seq of the last event already received; 0 for none.
        """
        self.after = after
        self.ended = False
        """True if the search has ended. A stream that stops earlier was interrupted."""
        self.call: Call[EventView] = Call(
            path=f"/v1/searches/{path_segment(search_id)}/events",
            answer=EventView,
            headers={"Last-Event-ID": str(after)},
            timeout=httpx.Timeout(30.0, read=SILENCE_S),
        )
        self._lines = Lines()
        self._name = ""

    def feed(self, chunk: bytes) -> Iterator[EventView]:
        """Return the events that `chunk` completes.

        Named events mark the end of the stream and are not returned.
        """
        for line in self._lines.feed(chunk):
            if line.startswith("event: "):
                self._name = line.removeprefix("event: ")
                self.ended = self._name == STREAM_END
            elif line.startswith("data: ") and not self._name:
                event: EventView = parse_response(EventView, line.removeprefix("data: "))
                self.after = event.seq
                yield event
            elif not line:
                self._name = ""


def split_batches(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield request bodies with at most BATCH_LINES lines each.

    A body ends early after the line with which it exceeds BATCH_BYTES.
    """
    body, count = bytearray(), 0
    for line in lines:
        if not line.strip():  # Empty lines have no answer.
            continue
        body += line.rstrip(b"\n") + b"\n"
        count += 1
        if count == BATCH_LINES or len(body) >= BATCH_BYTES:
            yield bytes(body)
            body, count = bytearray(), 0
    if body:
        yield bytes(body)


class Client(Endpoints):
    """A connection to one service. Not thread-safe."""

    def __init__(
        self,
        *,
        server: str,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Create the client.

        Args:
            server: Base URL.
            api_key: Default: HP_API_KEY.
            transport: For tests that need no socket.
        """
        base_url, headers = client_settings(server=server, api_key=api_key)
        retrying = RetryTransport(transport or httpx.HTTPTransport())
        self._http = httpx.Client(
            base_url=base_url, headers=headers, timeout=timeout_s, transport=retrying
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def send(self, call: Call[T]) -> T:
        """Return the answer to a call."""
        try:
            return call.read(self._http.send(call.request(self._http)))
        except httpx.TransportError as error:
            raise unreachable_error(self._http.base_url, error) from error

    @contextmanager
    def _stream(self, request: httpx.Request) -> Iterator[Iterator[bytes]]:
        try:
            response = self._http.send(request, stream=True)
            try:
                if not response.is_success:
                    response.read()
                    raise_problem(response)
                yield response.iter_bytes()
            finally:
                response.close()
        except httpx.TransportError as error:
            raise unreachable_error(self._http.base_url, error) from error

    def batch(
        self,
        *,
        lines: Iterable[bytes],
        task: str = "estimate",
        top: int = 10,
        calibration: bool = True,
    ) -> Iterator[str]:
        """Yield one answer per line, in order, as the answers arrive.

        Neither side stores all lines; they are sent in small requests. The server answers while it
        is still receiving a request. A large request could therefore fill the buffers in both
        directions, and client and server would wait for each other to read.
        """
        params: dict[str, str | int] = {
            "task": task,
            "top": top,
            "calibration": "true" if calibration else "false",
        }
        for content in split_batches(lines):
            yield from self._batch(content, params=params, due=content.count(b"\n"))

    def _batch(self, content: bytes, *, params: Mapping[str, str | int], due: int) -> Iterator[str]:
        headers = {"Content-Type": NDJSON}
        request = self._http.build_request(
            "POST", "/v1/batch", params=params, content=content, headers=headers
        )
        number, lines = 0, Lines()
        with self._stream(request) as chunks:
            for chunk in chunks:
                for answer in lines.feed(chunk):
                    yield answer
                    number += 1
        if number != due:
            raise HpToolError(f"the server answered {number} of {due} lines", code="bad_answer")

    def events(
        self, *, search_id: str, after: int = 0, patience_s: float = MAX_UNREACHABLE_S
    ) -> Iterator[EventView]:
        """Yield each event of the search after number `after` once, until the search ends.

        Reconnects as often as necessary.

        Raises:
            StoreError: The server is unreachable for `patience_s` seconds.
        """
        reconnects = ReconnectPolicy(patience_s=patience_s)
        while True:
            stream = EventStream(search_id=search_id, after=after)
            try:
                with self._stream(stream.call.request(self._http)) as chunks:
                    reconnects.connected()
                    for chunk in chunks:
                        yield from stream.feed(chunk)
                if stream.ended:
                    return
                connection_error = unreachable_error(self._http.base_url, "the stream was cut off")
            except StoreError as error:
                connection_error = error
            after = stream.after
            time.sleep(reconnects.wait_s(connection_error))

    def wait(
        self,
        *,
        search_id: str,
        on_event: Callable[[EventView], object] = lambda event: None,
        patience_s: float = MAX_UNREACHABLE_S,
    ) -> JsonObject:
        """Wait for a search to end and return its result.

        Survives lost connections and server restarts.

        Raises:
            HpToolError: The search ended without any result, as it would in this process.
            StoreError: The server is unreachable for `patience_s` seconds.
        """
        last_seq, reconnects = 0, ReconnectPolicy(patience_s=patience_s)
        while True:
            for event in self.events(search_id=search_id, after=last_seq, patience_s=patience_s):
                last_seq = event.seq
                on_event(event)
            try:
                result = self.result(search_id=search_id, wait_s=10.0)
            except StoreError as error:
                time.sleep(reconnects.wait_s(error))
                continue
            reconnects.connected()
            if result is not None:
                return require_result(result)
