"""Streams as the clients read and send them: batch lines and server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import httpx

from service.api.views import STREAM_END, EventView
from service.endpoints import Call, parsed

BATCH_LINES = 256
BATCH_BYTES = 1 << 16
"""Bounds of one request of a batch: small beside what sockets buffer."""
SILENCE_S = 60.0
"""The service pings an event stream every 15 s; a longer silence is a dead connection."""


class Lines:
    """Splits a stream into lines. httpx's own splitter also cuts at separators that JSON may hold within a line (U+2028)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode() for line in whole]


class EventStream:
    """The server-sent events of one connection."""

    def __init__(self, *, search_id: str, after: int) -> None:
        """`after`: seq of the last event already received; 0: none."""
        self.after = after
        self.ended = False
        """The search has ended; a stream that stops before that was cut off."""
        self.call: Call[EventView] = Call(
            path=f"/v1/searches/{search_id}/events",
            answer=EventView,
            headers={"Last-Event-ID": str(after)},
            timeout=httpx.Timeout(30.0, read=SILENCE_S),
        )
        self._lines = Lines()
        self._name = ""

    def feed(self, chunk: bytes) -> Iterator[EventView]:
        """The events that `chunk` completes; named ones mark the stream's end and belong to no search."""
        for line in self._lines.feed(chunk):
            if line.startswith("event: "):
                self._name = line.removeprefix("event: ")
                self.ended = self._name == STREAM_END
            elif line.startswith("data: ") and not self._name:
                event: EventView = parsed(EventView, line.removeprefix("data: "))
                self.after = event.seq
                yield event
            elif not line:
                self._name = ""


def batches(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Request bodies of at most BATCH_LINES lines, each closed by the line that brings it to BATCH_BYTES."""
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
