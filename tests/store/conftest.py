"""Every test of the store runs on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from hp_tool.domain.measurement import Fidelity, Hardware, Measurement
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.store import SqlStore, open_store
from hp_tool.store.engine import create_engine
from hp_tool.store.tables import metadata


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.components)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/empty.sqlite3"
    return request.getfixturevalue("postgres_url")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.components)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with our tables, all empty."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.sqlite3"
    url: str = request.getfixturevalue("migrated_postgres_url")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(f"TRUNCATE {', '.join(metadata.tables)}"))
    engine.dispose()
    return url


@pytest.fixture
def store(store_url: str) -> Iterator[SqlStore]:
    opened = open_store(store_url)
    yield opened
    opened.close()


@pytest.fixture
def new_measurement() -> Callable[..., NewMeasurement]:
    """Makes measurements; keywords replace fields of NewMeasurement, `step_s` and `status` those of
    the numbers.
    """

    def make(*, step_s: float | None = 1.5, status: Any = "ok", **fields: Any) -> NewMeasurement:
        measurement = Measurement(
            status=status,
            step_s=step_s,
            step_times_s=(1.4, 1.5, 1.6),
            peak_memory_bytes=2**40,  # more than 32 bits hold
            fidelity=Fidelity(steps=3),
            hardware=Hardware(gpu="cpu", num_gpus=2, hosts=("localhost",)),
            versions={"torch": "2.13"},
        )
        given = {
            "source": "profile",
            "cluster_key": "cpu x2",
            "gpu": "cpu",
            "framework": "megatron-core",
            "model": "gpt-tiny",
            "query": {"kind": "training"},
            "parallel": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
            "measurement": measurement,
        }
        return NewMeasurement(**(given | fields))

    return make
