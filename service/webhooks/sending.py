"""One POST to a URL from a user: resolved once, to admitted addresses only, and over within seconds whatever the receiver does.
Redirects are not followed, proxies are not used, and only the status of the answer is read.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpcore
import httpx

from service.webhooks.policy import Address, WebhookSettings

LIMIT_S = 10.0
"""From the first look-up to the last header."""
FAILURES = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, httpcore.UnsupportedProtocol)


class DeliveryError(Exception):
    """A failed delivery; the text says why, without the receiver's answer."""


def post(
    url: httpx.URL,
    *,
    settings: WebhookSettings,
    body: bytes,
    headers: Mapping[str, str],
    limit_s: float = LIMIT_S,
    ssl_context: ssl.SSLContext | None = None,
) -> None:
    """Send `body`; DeliveryError unless it is answered with a 2xx. `ssl_context`: default httpx's."""
    encrypted = url.scheme == "https"
    backend = Guarded(admits=lambda address: settings.admits(address, encrypted=encrypted), deadline=time.monotonic() + limit_s)
    target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    context = ssl_context or httpx.create_ssl_context() if encrypted else None
    sent: dict[bytes | str, bytes | str] = {"Host": url.netloc, "Content-Type": "application/json", "User-Agent": "hp-tool"}
    sent.update(headers)
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), limit_s)
    try:
        with (
            httpcore.ConnectionPool(ssl_context=context, network_backend=backend) as pool,
            pool.stream("POST", target, headers=sent, content=body, extensions={"timeout": timeouts}) as response,
        ):
            status = response.status
    except FAILURES as error:
        raise DeliveryError(f"{type(error).__name__}: {error}") from error
    if not 200 <= status < 300:
        raise DeliveryError(f"answered {status}")


class Guarded(httpcore.NetworkBackend):
    """Connects to the addresses of a name, if all of them are admitted. The address checked is the address connected to, so a
    second look-up cannot answer differently (DNS rebinding)."""

    def __init__(self, *, admits: Callable[[Address], bool], deadline: float) -> None:
        self._admits = admits
        self._deadline = deadline
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        addresses = _resolved(host, port)
        if not addresses or not all(map(self._admits, addresses)):
            raise httpcore.ConnectError("the name does not stand for public addresses alone")
        failure: Exception | None = None
        for address in addresses:
            try:
                stream = self._inner.connect_tcp(str(address), port, left_s(self._deadline), local_address, socket_options)
                return Bounded(stream, deadline=self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        assert failure is not None  # there was an address
        raise failure


class Bounded(httpcore.NetworkStream):
    """A connection with one deadline for everything, so that a receiver cannot prolong it byte by byte."""

    def __init__(self, inner: httpcore.NetworkStream, *, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, left_s(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, left_s(self._deadline))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return Bounded(self._inner.start_tls(ssl_context, server_hostname, left_s(self._deadline)), deadline=self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def left_s(deadline: float) -> float:
    """Seconds until `deadline`; raises ReadTimeout once it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise httpcore.ReadTimeout("it took too long")
    return seconds


def _resolved(host: str, port: int) -> list[Address]:
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(ipaddress.ip_address(answer[4][0]) for answer in answers))
    except (OSError, ValueError) as error:  # UnicodeError, of names that are none, is a ValueError
        raise httpcore.ConnectError("the name is not found") from error
