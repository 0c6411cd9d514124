"""HTTP/1.1 as uvicorn speaks it, with an end to its patience: uvicorn itself waits for ever for a first request's headers."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 10.0
"""How long a connection may be without a request whose headers are complete."""


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes a connection that sends no whole request in time."""

    headers_s = HEADERS_S
    _giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        """Start to wait where no request is under way, and stop where one is."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._giving_up is None:
            self._giving_up = self.loop.call_later(self.headers_s, self._give_up)

    def _stop_watching(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._giving_up = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
