"""The database's clock jumps: a dead worker's search is never held longer than its lease."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from hp_tool.domain.states import SearchState
from hp_tool.store import SqlStore, base, coordination, webhooks

LEASE_S = 60.0


@pytest.mark.parametrize(("hours", "free"), [(1.0, True), (-1.0, True), (0.0, False)])
def test_a_jump_frees_what_nobody_renews(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch, hours: float, free: bool
) -> None:
    made = store.create_search(query={})
    first = store.claim_search(holder="dies", lease_s=LEASE_S)
    assert first is not None

    def jumped(connection: object) -> datetime:
        return base.now(connection) + timedelta(hours=hours)  # type: ignore[arg-type]

    monkeypatch.setattr(coordination, "now", jumped)
    second = store.claim_search(holder="goes on", lease_s=LEASE_S)
    assert (second is not None) is free
    if second is not None:
        assert (second[1].search_id, second[1].token) == (made.id, 2)
        assert (
            store.claim_search(holder="third", lease_s=LEASE_S) is None
        )  # the new lease is of the new time


def test_a_clock_that_is_set_back_by_a_little_takes_nothing_away(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_search(query={})
    assert store.claim_search(holder="works", lease_s=LEASE_S) is not None
    monkeypatch.setattr(
        coordination, "now", lambda connection: base.now(connection) - timedelta(seconds=1)
    )
    assert store.claim_search(holder="other", lease_s=LEASE_S) is None


@pytest.mark.parametrize("attempts", [0, 1])
def test_an_end_is_told_though_the_clock_was_set_back(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    store.create_search(query={}, webhook="https://ci.example/hook")
    claimed = store.claim_search(holder="works", lease_s=LEASE_S)
    assert claimed is not None
    store.finish_search(lease=claimed[1], state=SearchState.SUCCEEDED)
    for _ in range(attempts):
        assert store.claim_webhook() is not None  # by a worker that dies over it
        assert store.claim_webhook() is None
    monkeypatch.setattr(
        webhooks, "now", lambda connection: base.now(connection) - timedelta(hours=1)
    )
    assert store.claim_webhook() is not None
    assert store.claim_webhook() is None
