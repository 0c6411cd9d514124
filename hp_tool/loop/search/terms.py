"""What a coordinator knows beside its search: how the cluster takes its jobs, and how time
passes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hp_tool.domain.records import OpenRunsLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The cluster's side of a search."""

    limit: OpenRunsLimit | None = None
    """The runs that the cluster takes at a time, of all searches; None: any number."""
    owner: str = ""
    """Whose search it is, for the site's accounts."""
    avoided_hosts: tuple[str, ...] = ()
    """Nodes that a check before the search found to lag: none of its jobs gets them."""
    check_gpu_seconds: float = 0.0
    """GPU-seconds of that check, charged to the first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often a coordinator acts, and by which clock."""

    lease_s: float = 60.0
    """How long the lease lasts from each renewal."""
    poll_s: float = 0.25
    """Between two looks at the jobs."""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    """Seconds from any start, never backwards."""
