"""What the port promises of measurements."""

from __future__ import annotations

import pytest

from hp_tool.domain.ports import Store
from hp_tool.errors import ConflictError, NotFoundError
from tests.store.acting import NewMeasurementFactory


def test_filters_and_pages(store: Store, new_measurement: NewMeasurementFactory) -> None:
    for number in range(5):
        store.add_measurement(measurement=new_measurement(step_s=number + 1.0, source="reported"))
    store.add_measurement(measurement=new_measurement(gpu="h100-sxm-80gb", problem_digest="p"))
    store.add_measurement(measurement=new_measurement(status="oom", step_s=None))
    first = store.measurements(source="reported", limit=3)
    second = store.measurements(source="reported", limit=3, cursor=first.next_cursor)
    assert [m.measurement.step_s for m in first.items + second.items] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert second.next_cursor is None
    assert [m.measurement.status for m in store.measurements(status="oom").items] == ["oom"]
    (h100,) = store.measurements(
        problem_digest="p", digest=first.items[0].digest, gpu="h100-sxm-80gb"
    ).items
    assert h100.gpu == "h100-sxm-80gb"
    assert store.measurements(model="other").items == ()


def test_an_idempotency_key_stores_one(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    first = store.add_measurement(measurement=new_measurement(), idempotency_key="k")
    assert store.add_measurement(measurement=new_measurement(), idempotency_key="k") == first
    with pytest.raises(ConflictError):
        store.add_measurement(measurement=new_measurement(step_s=2.0), idempotency_key="k")
    assert len(store.measurements().items) == 1


def test_a_measurement_may_be_excluded_deleted_and_accepted_again(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    first, second = (
        store.add_measurement(measurement=new_measurement(step_s=seconds)) for seconds in (1.0, 2.0)
    )
    held = store.add_measurement(measurement=new_measurement(state="held"))
    assert {each.id for each in store.measurements(state="accepted").items} == {first.id, second.id}
    assert [each.id for each in store.measurements(state="held").items] == [held.id]
    assert (
        store.set_measurement_state(measurement_id=first.id, state="excluded").state == "excluded"
    )
    store.set_measurement_state(measurement_id=second.id, state="deleted")
    assert {each.id for each in store.measurements().items} == {first.id, held.id}
    assert [each.id for each in store.measurements(state="deleted").items] == [second.id]
    assert store.measured_clusters()[0].measurements == 0
    assert store.set_measurement_state(measurement_id=second.id, state="accepted") == second
    assert store.get_measurement(measurement_id=second.id) == second
    with pytest.raises(NotFoundError):
        store.set_measurement_state(measurement_id="nope", state="excluded")


def test_an_unknown_measurement_is_not_found(store: Store) -> None:
    with pytest.raises(NotFoundError):
        store.get_measurement(measurement_id="nope")
