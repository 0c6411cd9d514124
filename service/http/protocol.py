"""uvicorn's HTTP/1.1 protocol with limits on idle time, headers and connections per address.

Without these limits, uvicorn waits for headers forever, accepts headers of any size, and lets one
address use all connections. All of this happens before a key is checked.
"""

import asyncio
import ipaddress
from collections import Counter
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.api.problems import plain_problem
from service.settings import Settings

HEADER_TIMEOUT_S = 10.0
"""Seconds within which a connection must send complete headers."""
RESERVE_PER_ADDRESS = 4
"""Maximum number of connections with which an address may still use the reserve."""
_IPV6_NETWORK = 64
"""Prefix length of the IPv6 network that providers assign to a subscriber."""


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Rejects late or oversized headers, and addresses with too many connections."""

    headers_s = HEADER_TIMEOUT_S
    max_header_bytes: ClassVar[int]
    max_per_address: ClassVar[int]
    max_unreserved: ClassVar[int]
    """Number of open connections above which only addresses with few connections may open more."""
    per_address: ClassVar[Counter[str]]
    _timeout: asyncio.TimerHandle | None = None
    _peer: str | None = None
    _refused = False
    _message_bytes = 0
    """Size of the current message's request target, headers and trailers, in bytes."""
    _unread_bytes = 0
    """Bytes since the parser last completed an element. It buffers incomplete headers."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._peer = _connection_network(transport.get_extra_info("peername"))
        self.per_address[self._peer] += 1
        count = self.per_address[self._peer]
        if count > self.max_per_address:
            self._refuse_connection(
                f"Too many connections from this address: at most {self.max_per_address} "
                "(HP_MAX_CONNECTIONS_PER_ADDRESS). Close some."
            )
        elif count > RESERVE_PER_ADDRESS and len(self.connections) > self.max_unreserved:
            self._refuse_connection(
                f"{self.max_unreserved} connections are open. The rest (HP_MAX_CONNECTIONS) is "
                f"reserved for addresses with at most {RESERVE_PER_ADDRESS}. Close some, or try "
                "again later."
            )
        else:
            self._update_timeout()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._is_bounded and self._unread_bytes > self.max_header_bytes + len(data):
            self._refuse_headers()
        elif not self._refused:
            self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timeout()
        if self._peer is not None:
            self.per_address[self._peer] -= 1
            if self.per_address[self._peer] <= 0:
                del self.per_address[self._peer]
            self._peer = None

    # Callbacks of httptools' parser. h11, uvicorn's fallback, limits headers itself.
    _is_bounded = hasattr(AutoHTTPProtocol, "on_header")

    def on_message_begin(self) -> None:
        self._message_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value) + 4)
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
        """Send status 400 for a parser error, unless this class caused it and has responded."""
        if not self._refused:
            super().send_400_response(msg)

    def _count_header_bytes(self, size: int) -> None:
        """Count header bytes. Above the limit, stop the parser with an error that is expected."""
        self._unread_bytes = 0
        self._message_bytes += size
        if self._message_bytes > self.max_header_bytes:
            self._refuse_headers()
            raise ValueError("the headers are too large")

    def _refuse_headers(self) -> None:
        detail = (
            f"The request's target and headers exceed {self.max_header_bytes // 1024} KiB "
            "(HP_MAX_HEADER_KIB)."
        )
        self._refuse(431, code="headers_too_large", detail=detail)

    def _refuse_connection(self, detail: str) -> None:
        self._refuse(503, code="too_many_connections", detail=detail)

    def _refuse(self, status: int, *, code: str, detail: str) -> None:
        self._refused = True
        self._cancel_timeout()
        self.transport.write(plain_problem(status, code=code, detail=detail))
        self.transport.close()

    def _update_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timeout()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(self.headers_s, self._close_if_idle)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _close_if_idle(self) -> None:
        self._timeout = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def protocol_class(settings: Settings) -> type[BoundedProtocol]:
    """Return a server's protocol class, with its limits and connection counts."""
    limits = {
        "max_header_bytes": settings.max_header_kib * 1024,
        "max_per_address": settings.connections_per_address,
        "max_unreserved": settings.max_connections - settings.reserved_connections,
        "per_address": Counter(),
    }
    return type("BoundedProtocol", (BoundedProtocol,), limits)


def _connection_network(peer: object) -> str:
    """Return the network by which connections are counted.

    It is an IPv4 address, an IPv6 /64 network, or "" for a Unix socket.
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
