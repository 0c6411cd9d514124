"""The lease of a search, renewed beside the work: learning from runs may take longer than a short lease lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from hp_tool.domain.ports import Store
from hp_tool.domain.records import Lease
from hp_tool.errors import ConflictError, StoreError

LEASE_S = 30.0
"""A coordinator that died keeps its search from others this long; a living one renews far more often."""
PATIENCE_LEASES = 10
"""A coordinator that shows no sign of life for this many leases has lost its way, and loses its search."""


class Heartbeat:
    """Renews `lease` in a thread of its own until left, lost, or the work beside it stands still."""

    def __init__(self, *, store: Store, lease: Lease, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._lease, self._lease_s, self._clock = store, lease, lease_s, clock
        self._seen = clock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{lease.search_id}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._left.set()
        self._thread.join(timeout=self._lease_s)

    def watched(self, question: Callable[[], bool]) -> Callable[[], bool]:
        """`question`, which the work asks again and again; each time is a sign of life."""

        def asked() -> bool:
            self._seen = self._clock()
            return question()

        return asked

    def _run(self) -> None:
        while not self._left.wait(self._lease_s / 3):
            if self._clock() - self._seen > PATIENCE_LEASES * self._lease_s:
                return
            try:
                self._store.renew_lease(lease=self._lease, lease_s=self._lease_s)
            except ConflictError:  # ended, handed back or taken over: whoever works here learns it at the next write
                return
            except StoreError:  # away for a while; the lease may last until it is back
                continue
