"""Webhooks that are called when a search ends, and their delivery state."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

ATTEMPTS = 8
"""Maximum number of delivery attempts, over about three hours."""
FIRST_WAIT_S = 15.0
"""Seconds until an attempt that was never settled is repeated. This is longer than a delivery can
take.
"""
MAX_WAIT_S = 3600.0
OVERDUE_S = 120.0
"""Delay from which a delivery counts as overdue. Workers look for due deliveries every few
seconds.
"""


class WebhookState(StrEnum):
    """State of a delivery."""

    PENDING = "pending"
    """The search has not ended, or the next attempt is due at `next_attempt_at`."""
    DELIVERED = "delivered"
    """The receiver returned a 2xx status."""
    FAILED = "failed"
    """All attempts failed; `last_error` contains the last error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRecord:
    """The webhook of one search."""

    search_id: str
    url: str = field(repr=False)
    """URL of the receiver. It may contain a secret and is not logged."""
    state: WebhookState
    attempts: int
    """Number of attempts since the search last ended."""
    next_attempt_at: datetime
    last_error: str | None = None
    created_at: datetime
    delivered_at: datetime | None = None


def wait_s(*, attempt: int) -> float:
    """Return the seconds between an attempt (1, 2, ...) and the next: 15 s, 1, 4 and 16 min, then 1
    h.
    """
    return min(FIRST_WAIT_S * 4.0 ** (attempt - 1), MAX_WAIT_S)
