"""Deliver webhooks when searches end or watched jobs change, in threads of a worker."""

import ipaddress
import json
import logging
import queue
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpcore
import httpx

from hp_tool.domain.access import AccessStore
from hp_tool.domain.records import SearchRecord
from hp_tool.domain.watch_records import WatchRecord
from hp_tool.errors import HpToolError, InputError
from service.logs import log_errors
from service.webhooks.policy import Address, WebhookSettings
from service.webhooks.signing import signed_headers

log = logging.getLogger(__name__)
POLL_S = 2.0
OVERDUE_CHECK_S = 60.0
MAX_TEXT_LENGTH = 1000
DELIVERY_TIMEOUT_S = 10.0
"""Timeout of a delivery in seconds, from the DNS lookup to the response headers."""
MAX_CONCURRENT, MAX_CONCURRENT_PER_OWNER = 8, 2
"""Maximum number of concurrent deliveries of a worker: in total, and per owner."""
FAILURES = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)
FIGURES = ("profile_runs", "gpu_seconds", "grid_gpu_seconds")


class DeliveryError(Exception):
    """A failed delivery. The text gives the reason, without content of the receiver's response."""


def send_message(
    url: httpx.URL,
    *,
    settings: WebhookSettings,
    body: bytes,
    headers: Mapping[str, str],
    limit_s: float = DELIVERY_TIMEOUT_S,
    ssl_context: ssl.SSLContext | None = None,
) -> None:
    """Send a message.

    The URL is user input. Its host name is resolved once, and only allowed addresses are contacted.
    Redirects are not followed, and no proxy is used. Everything must finish within `limit_s`. Only
    the status of the response is read.

    Args:
        url: Target.
        settings: Allowed networks.
        body: JSON body.
        headers: Headers with the signature.
        limit_s: Timeout in seconds.
        ssl_context: Default: that of httpx.

    Raises:
        DeliveryError: The response is not 2xx, or there is none.
    """
    encrypted = url.scheme == "https"
    backend = GuardedBackend(
        admits=lambda address: settings.admits(address, encrypted=encrypted),
        deadline=time.monotonic() + limit_s,
    )
    target = httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )
    context = ssl_context or httpx.create_ssl_context() if encrypted else None
    request_headers: dict[bytes | str, bytes | str] = {
        "Host": url.netloc,
        "Content-Type": "application/json",
        "User-Agent": "hp-tool",
    }
    request_headers.update(headers)
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), limit_s)
    try:
        with (
            httpcore.ConnectionPool(ssl_context=context, network_backend=backend) as pool,
            pool.stream(
                "POST",
                target,
                headers=request_headers,
                content=body,
                extensions={"timeout": timeouts},
            ) as response,
        ):
            status = response.status
    except FAILURES as error:
        raise DeliveryError(f"{type(error).__name__}: {error}") from error
    if not 200 <= status < 300:
        raise DeliveryError(f"HTTP status {status}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claimed attempt to deliver a message."""

    owner: str | None
    url: str = field(repr=False)
    body: bytes
    message_id: str
    """ID of the message. All attempts have the same ID, so that receivers can drop duplicates."""
    settle: Callable[[str | None], None]
    """Stores the outcome: an error message, or None for success."""
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """Delivers due messages, a few at a time. Any number of workers may share a database."""

    store: AccessStore
    settings: WebhookSettings
    stopping: threading.Event
    poll_s: float = POLL_S
    send: Callable[..., None] = send_message
    _under_way: Counter[str | None] = field(default_factory=Counter)
    """Number of deliveries in progress, by owner."""
    _ended: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a delivery has finished."""

    def run(self) -> None:
        """Deliver messages until `stopping` is set."""
        with ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="webhook") as pool:
            while not self.stopping.is_set():
                claim = None
                with log_errors("claim webhooks", log):
                    claim = self._claim()
                if claim is not None:
                    pool.submit(self._deliver, claim)
                else:
                    with self._ended:
                        self._ended.wait(self.poll_s)

    def step(self) -> bool:
        """Make one attempt that is due; return False if none is due."""
        claim = self._claim()
        if claim is not None:
            self._deliver(claim)
        return claim is not None

    def _claim(self) -> Claim | None:
        """Claim a message of an owner below its limit.

        Because of the limit, slow receivers delay only messages of their own owner.
        """
        with self._ended:
            if self._under_way.total() >= MAX_CONCURRENT:
                return None
            full = [
                owner
                for owner, count in self._under_way.items()
                if count >= MAX_CONCURRENT_PER_OWNER
            ]
            claim = self._claim_search(full) or self._claim_watch(full)
            if claim is not None:
                self._under_way[claim.owner] += 1
            return claim

    def _claim_search(self, full: list[str | None]) -> Claim | None:
        claim = self.store.claim_webhook(except_of=full)
        if claim is None:
            return None
        webhook, search = claim
        return Claim(
            owner=search.owner,
            url=webhook.url,
            body=message(search),
            message_id=message_id(search),
            settle=lambda error: self.store.settle_webhook(webhook=webhook, error=error),
            words=f"search {search.id}: webhook, attempt {webhook.attempts}",
        )

    def _claim_watch(self, full: list[str | None]) -> Claim | None:
        watch = self.store.claim_watch_event(except_of=full)
        if watch is None:
            return None
        return Claim(
            owner=watch.owner,
            url=watch.webhook or "",
            body=watch_message(watch),
            message_id=f"{watch.id}-{watch.event}",
            settle=lambda error: self.store.settle_watch_event(watch=watch, error=error),
            words=f"watch {watch.id}: webhook, attempt {watch.attempts}",
        )

    def _deliver(self, claim: Claim) -> None:
        try:
            with log_errors("deliver webhooks", log):
                self._attempt(claim)
        finally:
            with self._ended:
                self._under_way[claim.owner] -= 1
                self._ended.notify_all()

    def _attempt(self, claim: Claim) -> None:
        key, timestamp = self.settings.key, int(time.time())
        headers = signed_headers(
            key=key, message_id=claim.message_id, timestamp=timestamp, body=claim.body
        )
        error: str | None = None
        try:
            self.send(
                self.settings.check(claim.url),
                settings=self.settings,
                body=claim.body,
                headers=headers,
            )
        except (DeliveryError, InputError) as failure:  # The allowed networks may have changed.
            error = str(failure)
        claim.settle(error)
        log.info("%s: %s", claim.words, error or "delivered")


def warn_of_overdue(
    *, store: AccessStore, stopping: threading.Event, check_interval_s: float = OVERDUE_CHECK_S
) -> None:
    """Warn the operator once if messages are overdue. Runs if there is no signing secret."""
    while not stopping.is_set():
        with suppress(HpToolError):  # The worker itself reports an unreachable database.
            if overdue := store.state().overdue_webhooks:
                fix = "set HP_WEBHOOK_SECRET or HP_WEBHOOK_SECRET_FILE as for the API"
                log.warning(
                    "%d webhooks are overdue, but this worker has no secret to sign them: %s",
                    overdue,
                    fix,
                )
                return
        stopping.wait(check_interval_s)


def message_id(search: SearchRecord) -> str:
    """Return the message ID for this end of the search. It is the same for every attempt."""
    assert search.finished_at is not None
    return f"{search.id}-{round(search.finished_at.timestamp() * 1e6)}"


def message(search: SearchRecord) -> bytes:
    """Return the message about a finished search: outcome, cost, and the path of its result."""
    assert search.finished_at is not None
    summary = (search.result or {}).get("search") or {}
    error = search.error and {
        name: _cut(search.error.get(name)) for name in ("code", "message", "field")
    }
    data = {
        "search_id": search.id,
        "id": _cut(search.query.get("id")),
        "state": search.state,
        "stopped_because": _cut(search.stopped_because),
        "error": error,
        **{name: summary.get(name) for name in FIGURES},
        "result": f"/v1/searches/{search.id}/result",
    }
    return json.dumps(
        {"type": "search.ended", "timestamp": search.finished_at.isoformat(), "data": data}
    ).encode()


def watch_message(watch: WatchRecord) -> bytes:
    """Return the message about a watched job's newest event: a slowdown or a recovery."""
    verdict = watch.message or {}
    names = (
        "status",
        "steps",
        "now",
        "was",
        "expected",
        "slowdown",
        "lag",
        "causes",
        "loss_per_day",
        "text",
    )
    data = {
        "watch_id": watch.id,
        "name": watch.name,
        "event": watch.event,
        **{name: verdict.get(name) for name in names},
        "watch": f"/v1/watches/{watch.id}",
    }
    return json.dumps(
        {"type": "watch.changed", "timestamp": watch.updated_at.isoformat(), "data": data}
    ).encode()


def _cut(value: Any) -> str | None:
    return None if value is None else str(value)[:MAX_TEXT_LENGTH]


class GuardedBackend(httpcore.NetworkBackend):
    """Connects to a host only if all its addresses are allowed.

    The connection uses a checked address, so that a second lookup cannot return another one (DNS
    rebinding).
    """

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
        addresses = _resolve_host(host, port, limit_s=left_s(self._deadline))
        if not addresses or not all(map(self._admits, addresses)):
            raise httpcore.ConnectError("the host resolves to an address that is not public")
        failure: Exception | None = None
        for address in addresses:
            try:
                stream = self._inner.connect_tcp(
                    str(address), port, left_s(self._deadline), local_address, socket_options
                )
                return DeadlineStream(stream, deadline=self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure


class DeadlineStream(httpcore.NetworkStream):
    """A connection with one deadline for all operations. A slow receiver cannot extend it."""

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
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return DeadlineStream(
            self._inner.start_tls(ssl_context, server_hostname, left_s(self._deadline)),
            deadline=self._deadline,
        )

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def left_s(deadline: float) -> float:
    """Return the seconds until `deadline`; raise ReadTimeout if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise httpcore.ReadTimeout("timed out")
    return seconds


def _resolve_host(host: str, port: int, *, limit_s: float) -> list[Address]:
    """Resolve a host's addresses in a thread, because DNS lookups have no timeout."""
    outcome: queue.SimpleQueue[list[Address] | None] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            outcome.put(
                list(dict.fromkeys(ipaddress.ip_address(answer[4][0]) for answer in answers))
            )
        except (OSError, ValueError):  # An invalid name raises UnicodeError, which is a ValueError.
            outcome.put(None)

    threading.Thread(target=look_up, name="webhook-name", daemon=True).start()
    try:
        addresses = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise httpcore.ConnectTimeout("name lookup timed out") from None
    if addresses is None:
        raise httpcore.ConnectError("the host name cannot be resolved")
    return addresses
