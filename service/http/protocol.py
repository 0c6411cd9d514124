"""HTTP/1.1 as uvicorn speaks it, with an end to its patience: before anybody's key is known,
uvicorn itself waits for ever for headers, takes them without limit, and lets one address have all
connections.
"""

import asyncio
import ipaddress
from collections import Counter
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.api.problems import plain_problem
from service.settings import Settings

HEADERS_S = 10.0
"""How long a connection may be without a request whose headers are complete."""
RESERVE_PER_ADDRESS = 4
"""Connections with which an address may still open one in the reserve."""
_IPV6_NETWORK = 64
"""Bits of an IPv6 address that one subscriber is given."""


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes a connection that sends no whole request in time or too many headers, or whose address
    has enough of them.
    """

    headers_s = HEADERS_S
    max_header_bytes: ClassVar[int]
    max_per_address: ClassVar[int]
    max_unreserved: ClassVar[int]
    """Connections of all addresses; beyond them only addresses with few may open one."""
    per_address: ClassVar[Counter[str]]
    _giving_up: asyncio.TimerHandle | None = None
    _peer: str | None = None
    _refused = False
    _message_bytes = 0
    """Bytes of this message's target and headers, trailers too, so far."""
    _unread_bytes = 0
    """Bytes since the parser last completed anything: it keeps the beginning of a header."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._peer = _network(transport.get_extra_info("peername"))
        self.per_address[self._peer] += 1
        own = self.per_address[self._peer]
        if own > self.max_per_address:
            self._refuse_connection(
                f"{self.max_per_address} connections from one address at a time "
                "(HP_MAX_CONNECTIONS_PER_ADDRESS); close some"
            )
        elif own > RESERVE_PER_ADDRESS and len(self.connections) > self.max_unreserved:
            self._refuse_connection(
                f"{self.max_unreserved} connections are open; the rest (HP_MAX_CONNECTIONS) is "
                "reserved for addresses with up "
                f"to {RESERVE_PER_ADDRESS}; close some, or try again later"
            )
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._is_bounded and self._unread_bytes > self.max_header_bytes + len(data):
            self._refuse_headers()
        elif not self._refused:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()
        if self._peer is not None:
            self.per_address[self._peer] -= 1
            if self.per_address[self._peer] <= 0:
                del self.per_address[self._peer]
            self._peer = None

    # What httptools' parser calls; h11, which uvicorn takes without it, bounds a request's headers
    # itself.
    _is_bounded = hasattr(AutoHTTPProtocol, "on_header")

    def on_message_begin(self) -> None:
        self._message_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer 400 where the parser stopped, unless this protocol stopped it and has answered."""
        if not self._refused:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        """Stop the parser, by an error that uvicorn expects of it, once a message has brought too
        much.
        """
        self._unread_bytes = 0
        self._message_bytes += size
        if self._message_bytes > self.max_header_bytes:
            self._refuse_headers()
            raise ValueError("the headers are too large")

    def _refuse_headers(self) -> None:
        detail = (
            f"a request's target and headers may have {self.max_header_bytes // 1024} KiB "
            "together (HP_MAX_HEADER_KIB)"
        )
        self._refuse(431, code="headers_too_large", detail=detail)

    def _refuse_connection(self, detail: str) -> None:
        self._refuse(503, code="too_many_connections", detail=detail)

    def _refuse(self, status: int, *, code: str, detail: str) -> None:
        """Answer and hang up."""
        self._refused = True
        self._stop_watching()
        self.transport.write(plain_problem(status, code=code, detail=detail))
        self.transport.close()

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


def bounded(settings: Settings) -> type[PatientProtocol]:
    """The protocol of one server, with its limits and its count of connections."""
    limits = {
        "max_header_bytes": settings.max_header_kib * 1024,
        "max_per_address": settings.connections_per_address,
        "max_unreserved": settings.max_connections - settings.reserved_connections,
        "per_address": Counter(),
    }
    return type("BoundedProtocol", (PatientProtocol,), limits)


def _network(peer: object) -> str:
    """The network that connections are counted by: an IPv4 address, an IPv6 /64, or '' for a Unix
    socket.
    """
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    mapped = address.ipv4_mapped
    return (
        str(mapped)
        if mapped is not None
        else str(ipaddress.ip_network((address, _IPV6_NETWORK), strict=False))
    )
