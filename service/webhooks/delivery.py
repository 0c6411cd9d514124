"""Delivery of webhooks when searches end, in a thread beside a worker's own work, which may take hours."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_tool.domain.access import AccessStore
from hp_tool.domain.records import SearchRecord
from hp_tool.errors import HpToolError, InputError
from service.logs import surviving
from service.webhooks.policy import WebhookSettings
from service.webhooks.sending import DeliveryError, post
from service.webhooks.signing import signed_headers

log = logging.getLogger(__name__)
POLL_S = 2.0
LOOK_S = 60.0
LONGEST_TEXT = 1000
FIGURES = ("profile_runs", "gpu_seconds", "grid_gpu_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """Delivers what is due, one message at a time; any number of workers do so on one database."""

    store: AccessStore
    settings: WebhookSettings
    stopping: threading.Event
    poll_s: float = POLL_S
    send: Callable[..., None] = post

    def run(self) -> None:
        """Deliver queued webhooks until `stopping` is set."""
        while not self.stopping.is_set():
            delivered = False
            with surviving("deliver webhooks", log):
                delivered = self.step()
            if not delivered:
                self.stopping.wait(self.poll_s)

    def step(self) -> bool:
        """Attempt one delivery that is due; False where none is."""
        claim = self.store.claim_webhook()
        if claim is None:
            return False
        webhook, search = claim
        body = message(search)
        key, timestamp = self.settings.key, int(time.time())
        headers = signed_headers(key=key, message_id=message_id(search), timestamp=timestamp, body=body)
        error: str | None = None
        try:
            self.send(self.settings.check(webhook.url), settings=self.settings, body=body, headers=headers)
        except (DeliveryError, InputError) as failure:  # what was admitted when the search was submitted may not be now
            error = str(failure)
        self.store.settle_webhook(webhook=webhook, error=error)
        log.info("search %s: webhook, attempt %d: %s", search.id, webhook.attempts, error or "delivered")
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Undelivered:
    """Stands in for `Deliveries` without a secret to sign with: warns the operator once messages are overdue."""

    store: AccessStore
    stopping: threading.Event
    look_s: float = LOOK_S

    def run(self) -> None:
        """Look every `look_s` seconds until it has warned, or `stopping` is set."""
        while not self.stopping.is_set() and not self.look():
            self.stopping.wait(self.look_s)

    def look(self) -> bool:
        """Whether messages are overdue; warns if so."""
        try:
            overdue = self.store.state().overdue_webhooks
        except HpToolError:  # the worker itself warns of a database that is away
            return False
        if overdue:
            fix = "set HP_WEBHOOK_SECRET or HP_WEBHOOK_SECRET_FILE, the API's, for the workers"
            log.warning("%d webhooks are overdue, and this worker has no secret to sign them with: %s", overdue, fix)
        return overdue > 0


def message_id(search: SearchRecord) -> str:
    """Id of the message for this end of the search, the same for every attempt, so that receivers can drop repetitions."""
    assert search.finished_at is not None  # it has ended
    return f"{search.id}-{round(search.finished_at.timestamp() * 1e6)}"


def message(search: SearchRecord) -> bytes:
    """The message: how the search ended, what it cost, and where its result is. Small, whatever the search was."""
    assert search.finished_at is not None
    summary = (search.result or {}).get("search") or {}
    error = search.error and {name: _cut(search.error.get(name)) for name in ("code", "message", "field")}
    data = {
        "search_id": search.id,
        "id": _cut(search.query.get("id")),
        "state": search.state,
        "stopped_because": _cut(search.stopped_because),
        "error": error,
        **{name: summary.get(name) for name in FIGURES},
        "result": f"/v1/searches/{search.id}/result",
    }
    return json.dumps({"type": "search.ended", "timestamp": search.finished_at.isoformat(), "data": data}).encode()


def _cut(value: Any) -> str | None:
    return None if value is None else str(value)[:LONGEST_TEXT]
