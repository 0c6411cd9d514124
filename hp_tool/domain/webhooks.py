"""Webhooks that report a search's end, and their delivery state."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

ATTEMPTS = 8
"""Maximum number of delivery attempts, over about three hours."""
FIRST_WAIT_S = 15.0
"""Seconds until an attempt that was never settled is repeated; longer than a delivery can take."""
MAX_WAIT_S = 3600.0
OVERDUE_S = 120.0
"""Delay from which a delivery counts as overdue; workers look every few seconds."""


class WebhookState(StrEnum):
    """State of a delivery."""

    PENDING = "pending"
    """The search has not ended, or the next attempt is due at `next_attempt_at`."""
    DELIVERED = "delivered"
    """The receiver returned a 2xx status."""
    FAILED = "failed"
    """All attempts failed; `last_error` has the last reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRecord:
    """The webhook of one search."""

    search_id: str
    url: str = field(repr=False)
    """May contain a token of the receiver, so it is not logged."""
    state: WebhookState
    attempts: int
    """Attempts since the search last ended."""
    next_attempt_at: datetime
    last_error: str | None = None
    created_at: datetime
    delivered_at: datetime | None = None


def wait_s(*, attempt: int) -> float:
    """Return the seconds between attempt 1, 2, ... and the next: 15 s, 1, 4, 16 min, then 1 h."""
    return min(FIRST_WAIT_S * 4.0 ** (attempt - 1), MAX_WAIT_S)
