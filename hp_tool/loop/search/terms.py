"""Environment of a coordinator: limits of the cluster, time intervals and clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hp_tool.domain.records import OpenRunsLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Settings of a search that depend on its cluster."""

    limit: OpenRunsLimit | None = None
    """Maximum number of concurrent runs on the cluster, over all searches. None for no limit."""
    owner: str = ""
    """Owner of the search, for accounting by the site."""
    avoided_hosts: tuple[str, ...] = ()
    """Slow nodes that a check before the search found. Jobs avoid them."""
    check_gpu_seconds: float = 0.0
    """GPU-seconds of that check. They are charged to the first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time intervals and clock of a coordinator."""

    lease_s: float = 60.0
    """Seconds from a lease's renewal to its expiry."""
    poll_s: float = 0.25
    """Seconds between polls of the jobs."""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds with an arbitrary origin."""
