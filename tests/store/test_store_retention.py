"""Forgetting: what was told goes, what was found stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.states import SearchState
from hp_tool.errors import InputError
from hp_tool.store import SqlStore, base, retention

FAILED = Measurement(status="crashed", cause="rank 3", log_tail="the end of the log")


def fill(store: SqlStore, new_measurement: Callable[..., NewMeasurement]) -> tuple[str, str]:
    """An ended search and a queued one, with everything that is told of them; their ids."""
    ended = store.create_search(query={}, owner="ada", idempotency_key="k").id
    claim = store.claim_search(holder="w", lease_s=60.0)
    assert claim is not None
    store.finish_search(lease=claim[1], state=SearchState.SUCCEEDED, result={"a": 1})
    store.add_measurement(measurement=replace(new_measurement(), measurement=FAILED))
    store.add_measurement(measurement=new_measurement())
    for _ in range(3):
        store.add_audit(owner="ada", api_key_id=None, action="POST", resource="/", outcome="202")
    return ended, store.create_search(query={}).id


def test_what_is_old_goes_and_what_was_found_stays(
    store: SqlStore, new_measurement: Callable[..., NewMeasurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, queued = fill(store, new_measurement)
    monkeypatch.setattr(retention, "PRUNED_ROWS", 2)
    deleted = store.add_measurement(measurement=new_measurement()).id
    store.set_measurement_state(measurement_id=deleted, state="deleted")
    nothing = {"events": 0, "audit": 0, "idempotency_keys": 0, "logs": 0, "measurements": 0}
    assert store.prune(older_than_days=1.0) == nothing  # all of it is of today

    def in_two_days(connection: Any) -> datetime:
        return base.now(connection) + timedelta(days=2)

    monkeypatch.setattr(retention, "now", in_two_days)
    assert store.prune(older_than_days=1.0) == {
        "events": 3,
        "audit": 3,
        "idempotency_keys": 1,
        "logs": 1,
        "measurements": 1,
    }
    assert store.prune(older_than_days=1.0) == nothing
    assert store.events(search_id=ended) == []
    assert len(store.events(search_id=queued)) == 1  # still to be followed
    assert store.get_search(search_id=ended).result == {"a": 1}
    failed = next(
        m.measurement for m in store.measurements().items if m.measurement.status == "crashed"
    )
    assert failed == replace(FAILED, log_tail=None)
    assert store.audit().items == ()
    assert store.measurements(state="deleted").items == ()


@pytest.mark.parametrize("days", [0.0, -1.0, 0.5, float("nan"), float("inf")])
def test_a_day_at_least_is_kept(store: SqlStore, days: float) -> None:
    with pytest.raises(InputError, match="Use 1 to"):
        store.prune(older_than_days=days)


def test_what_an_unfinished_search_needs_stays(
    store: SqlStore, new_measurement: Callable[..., NewMeasurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    reused = store.add_measurement(measurement=new_measurement()).id
    store.add_measurement(measurement=new_measurement())  # nobody needs it
    search_id = store.create_search(query={}).id
    lease = store.claim_search(holder="w", lease_s=60.0)[1]  # type: ignore[index]
    measured = store.intend_run(
        lease=lease, parallel=ParallelConfig(), fidelity=Fidelity(), predicted={}
    )
    own = store.finish_run(
        lease=lease, run_id=measured.id, measurement=new_measurement(), gpu_seconds=1.0
    ).measurement_id
    assert own is not None
    other = replace(ParallelConfig(), micro_batch_size=2)
    store.intend_run(
        lease=lease,
        parallel=other,
        fidelity=Fidelity(),
        predicted={"reused_measurement_id": reused},
    )
    store.set_measurement_state(measurement_id=own, state="deleted")
    monkeypatch.setattr(
        retention, "now", lambda connection: base.now(connection) + timedelta(days=2)
    )
    assert store.prune(older_than_days=1.0)["measurements"] == 0
    assert store.prune_measurements(older_than_days=1.0, dry_run=True) == 1
    assert store.prune_measurements(older_than_days=1.0) == 1
    assert store.get_measurement(measurement_id=own).id == own
    assert store.get_measurement(measurement_id=reused).id == reused
    for run in store.runs(search_id=search_id):
        if not run.state.ended:
            store.abandon_run(lease=lease, run_id=run.id, cause="ended")
    store.finish_search(lease=lease, state=SearchState.SUCCEEDED, result={})
    assert store.prune_measurements(older_than_days=1.0) == 2
