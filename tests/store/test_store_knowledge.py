"""What the port promises of calibrations, measured clusters and registrations."""

from __future__ import annotations

import pytest

from hp_tool.domain.ports import Store
from hp_tool.errors import NotFoundError
from tests.store.acting import NewMeasurementFactory


def test_calibrations_are_versions(store: Store) -> None:
    series = {"cluster_key": "cpu x2", "framework": "megatron-core"}
    assert store.latest_calibration(**series) is None
    first = store.save_calibration(**series, payload={"matmul": 0.5}, num_measurements=4)
    other = store.save_calibration(**series, model_family="llama", payload={}, num_measurements=1)
    second = store.save_calibration(**series, payload={"matmul": 0.6}, num_measurements=5)
    assert (first.version, second.version, other.version) == (1, 2, 1)
    assert store.latest_calibration(**series) == second
    assert store.latest_calibration(**series, model_family="llama") == other
    assert store.list_calibrations(cluster_key="cpu x2").items == (second, other, first)
    assert store.list_calibrations(framework="nanotron").items == ()


def test_measured_clusters_are_those_that_measurements_speak_of(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    assert store.measured_clusters() == []
    for key, framework in (
        ("a", "megatron-core"),
        ("a", "megatron-core"),
        ("a", "nanotron"),
        ("b", "nanotron"),
    ):
        store.add_measurement(measurement=new_measurement(cluster_key=key, framework=framework))
    found = [
        (each.cluster_key, each.framework, each.measurements) for each in store.measured_clusters()
    ]
    assert found == [("a", "megatron-core", 2), ("a", "nanotron", 1), ("b", "nanotron", 1)]
    assert [each.cluster_key for each in store.measured_clusters(framework="nanotron")] == [
        "a",
        "b",
    ]
    assert store.measured_clusters(gpu="l40s-48gb") == []


def test_a_registration_is_replaced_by_name_and_keeps_its_age(store: Store) -> None:
    first = store.put_registration(kind="cluster", name="lab", spec={"gpu": "cpu"}, owner="ada")
    second = store.put_registration(
        kind="cluster", name="lab", spec={"gpu": "l40s-48gb"}, owner="ada"
    )
    assert (second.spec, second.created_at) == ({"gpu": "l40s-48gb"}, first.created_at)
    assert store.get_registration(kind="cluster", name="lab", owner="ada") == second
    assert store.get_registration(kind="model", name="lab", owner="ada") is None


def test_a_name_means_ones_own_before_everybodys_and_never_anothers(store: Store) -> None:
    adas = store.put_registration(kind="cluster", name="lab", spec={"gpu": "cpu"}, owner="ada")
    assert store.get_registration(kind="cluster", name="lab", owner="bob") is None
    everybodys = store.put_registration(kind="cluster", name="lab", spec={"gpu": "l40s-48gb"})
    attic = store.put_registration(kind="cluster", name="attic", spec={})
    assert store.list_registrations(kind="cluster", owner="ada") == [attic, adas]
    assert store.list_registrations(kind="cluster", owner="bob") == [attic, everybodys]
    assert store.list_registrations(kind="cluster") == [attic, everybodys]
    store.remove_registration(kind="cluster", name="lab", owner="ada")
    assert store.get_registration(kind="cluster", name="lab", owner="ada") == everybodys
    with pytest.raises(NotFoundError):
        store.remove_registration(kind="cluster", name="lab", owner="ada")
