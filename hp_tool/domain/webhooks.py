"""A webhook: where to tell that a search has ended, and how far the telling has come."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

ATTEMPTS = 8
"""How often a delivery is tried before it is given up, about three hours after the first."""
FIRST_WAIT_S = 15.0
"""Longer than a delivery may take, for it is also how long one that began is left to its worker."""
LONGEST_WAIT_S = 3600.0
OVERDUE_S = 120.0
"""An attempt later than this has no worker that makes it, or none that keeps up: they look every
few seconds.
"""


class WebhookState(StrEnum):
    """Where a delivery stands."""

    PENDING = "pending"
    """The search has not ended, or the next attempt is due at `next_attempt_at`."""
    DELIVERED = "delivered"
    """Answered with a 2xx."""
    FAILED = "failed"
    """Given up; `last_error` says why the last attempt failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRecord:
    """The webhook of one search."""

    search_id: str
    url: str = field(repr=False)
    """May hold a token of the receiver's, so it stays out of logs."""
    state: WebhookState
    attempts: int
    """Begun so far, since the search last ended."""
    next_attempt_at: datetime
    last_error: str | None = None
    created_at: datetime
    delivered_at: datetime | None = None


def wait_s(*, attempt: int) -> float:
    """Seconds from the beginning of attempt 1, 2, ... to the next: 15 s, 1 min, 4 min, 16 min, then
    an hour.
    """
    return min(FIRST_WAIT_S * 4.0 ** (attempt - 1), LONGEST_WAIT_S)
