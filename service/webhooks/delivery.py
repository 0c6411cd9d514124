"""Telling that searches have ended, beside a worker's own work, which may keep it for hours."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_tool.domain.access_store import AccessStore
from hp_tool.domain.records import SearchRecord
from hp_tool.errors import HpToolError, InputError
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
        """Until told to stop. A database that is away for a while does not end it."""
        while not self.stopping.is_set():
            found = False
            try:
                found = self.step()
            except HpToolError as error:
                log.warning("cannot deliver webhooks: %s", error.message)
            except Exception:  # one message must not end the telling of the others
                log.exception("delivering a webhook: unhandled error")
            if not found:
                self.stopping.wait(self.poll_s)

    def step(self) -> bool:
        """Try one delivery that is due; whether there was one."""
        claimed = self.store.claim_webhook()
        if claimed is None:
            return False
        webhook, search = claimed
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
    """In the place of `Deliveries` where there is no secret to sign with: tells the operator when messages are overdue."""

    store: AccessStore
    stopping: threading.Event
    look_s: float = LOOK_S

    def run(self) -> None:
        """Until it has told, or is told to stop."""
        while not self.stopping.is_set() and not self.look():
            self.stopping.wait(self.look_s)

    def look(self) -> bool:
        """Warn if messages are overdue; whether they are."""
        try:
            overdue = self.store.state().overdue_webhooks
        except HpToolError:  # the worker itself tells of a database that is away
            return False
        if overdue:
            mend = "set HP_WEBHOOK_SECRET or HP_WEBHOOK_SECRET_FILE, the API's, for the workers"
            log.warning("%d ends of searches wait to be told, and this worker has no secret to sign with: %s", overdue, mend)
        return overdue > 0


def message_id(search: SearchRecord) -> str:
    """The same for every attempt to tell the same end, by which a receiver knows what it was told before."""
    assert search.finished_at is not None  # it has ended
    return f"{search.id}-{round(search.finished_at.timestamp() * 1e6)}"


def message(search: SearchRecord) -> bytes:
    """What is told: that it ended, how, what it cost, and where its result is. Small, whatever the search was."""
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
