"""The lease is renewed beside the work, for as long as the work goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError, PendingRollbackError

from hp_tool.domain.ports import Store
from hp_tool.domain.records import Lease
from hp_tool.errors import ConflictError, HpToolError, StoreError
from hp_tool.loop.tuning.lease import PATIENCE_LEASES, Heartbeat
from hp_tool.loop.tuning.run import run_search
from tests.service.processes import wait_for

LEASE = Lease(
    search_id="s", holder="h", token=1, expires_at=datetime.now(UTC), heartbeat_at=datetime.now(UTC)
)
LEASE_S = 0.03


class Renewals:
    """A store that can only renew."""

    def __init__(self, error: HpToolError | None = None) -> None:
        self.count, self.error = 0, error

    def renew_lease(self, **_: Any) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error


def beats(
    store: Renewals, *, clock: Callable[[], float] = time.monotonic, most: int | None = None
) -> int:
    """How often the lease is renewed in ten leases, or until it was `most` times, however long the
    machine takes for it.
    """
    with Heartbeat(store=cast(Store, store), lease=LEASE, lease_s=LEASE_S, clock=clock):
        if most is None:
            time.sleep(10 * LEASE_S)
        else:
            wait_for(lambda: store.count >= most)
    at_the_end = store.count
    time.sleep(3 * LEASE_S)
    assert store.count == at_the_end  # nobody renews what was left
    return at_the_end


def test_a_lease_outlasts_work_that_takes_longer() -> None:
    assert beats(Renewals(), clock=lambda: 0.0, most=3) >= 3


def test_a_store_that_is_away_is_asked_again() -> None:
    assert beats(Renewals(StoreError("away")), clock=lambda: 0.0, most=3) >= 3


def test_a_lost_lease_is_let_go() -> None:
    assert beats(Renewals(ConflictError("lost", code="lease_lost"))) == 1


def test_work_that_stands_still_loses_its_lease() -> None:
    times = iter([0.0])
    assert beats(Renewals(), clock=lambda: next(times, PATIENCE_LEASES * LEASE_S + 1.0)) == 0


def of_a_closed_connection() -> Exception:
    return OperationalError("SELECT 1", {}, Exception("connection closed"))


def of_the_next_statement_on_it() -> Exception:
    """What SQLAlchemy raises where a transaction goes on after its connection was lost."""
    with create_engine("sqlite://").connect() as connection, connection.begin():
        connection.invalidate()
        with pytest.raises(PendingRollbackError) as error:
            connection.execute(text("SELECT 1"))
    return error.value


@pytest.mark.parametrize("cause", [of_a_closed_connection, of_the_next_statement_on_it])
def test_trouble_with_the_studys_tables_leaves_the_search_to_the_next_worker(
    cause: Callable[[], Exception],
) -> None:
    class Away(Renewals):
        def get_search(self, **_: Any) -> None:
            raise StorageInternalError("...") from cause()

    with pytest.raises(StoreError):  # a store without finish_search: nothing was ended
        run_search(store=cast(Store, Away()), lease=LEASE)
