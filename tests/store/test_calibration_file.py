"""A SQLite file as commands read it, without SQLAlchemy: it answers as the store does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.store import open_calibrations, open_store
from hp_tool.store.calibration_file import CalibrationFile


def test_it_finds_the_measurements_that_teach_whoever_asks(
    tmp_path: Path, new_measurement: Callable[..., NewMeasurement]
) -> None:
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    store = open_store(url)
    for owner, trusted in (("ann", True), ("bob", False)):
        store.add_measurement(
            measurement=new_measurement(
                owner=owner, trusted=trusted, cluster_key=f"cluster-of-{owner}"
            )
        )
    file = open_calibrations(url)
    assert isinstance(file, CalibrationFile)
    for teaches, count in (("", 1), ("ann", 1), ("bob", 2)):
        found = [
            [
                row.cluster_key
                for row in each.measurements(limit=5, state="accepted", teaches=teaches).items
            ]
            for each in (file, store)
        ]
        assert found[0] == found[1] and len(found[0]) == count
    file.close()
    store.close()
