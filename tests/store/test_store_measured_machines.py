"""Measurements that an older version filed under the part of a machine that their job used find the
whole machine.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from hp_tool.domain.hardware import ClusterQuery
from hp_tool.store import open_store, schema
from hp_tool.store.engine import create_engine
from hp_tool.store.tables import measurements
from tests.store.acting import NewMeasurementFactory

OLD_AND_NEW: tuple[tuple[str, Any, str], ...] = (
    (
        "h100-sxm-80gb/node4/nvlink4/50GBps",
        {"gpu": "h100-sxm-80gb", "num_gpus": 4},
        "h100-sxm-80gb/node8/nvlink8/50GBps",
    ),
    (
        "h100-sxm-80gb/node8/nvlink8/50GBps",
        {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "h100-sxm-80gb/node8/nvlink8/50GBps",
    ),
    (
        "h100-sxm-80gb/node4/nvlink4/50GBps",
        {"gpu": "h100-sxm-80gb", "num_gpus": 16, "gpus_per_node": 4},
        "h100-sxm-80gb/node4/nvlink4/50GBps",
    ),
    (
        "h100-sxm-80gb/node4/nvlink4/50GBps/train.py",
        {"gpu": "h100-sxm-80gb", "num_gpus": 4},
        "h100-sxm-80gb/node8/nvlink8/50GBps/train.py",
    ),
    (
        "gb200-nvl72/node4/nvlink8/50GBps",
        {"gpu": "gb200-nvl72", "num_gpus": 8},
        "gb200-nvl72/node4/nvlink72/50GBps",
    ),
    (
        "gb200-nvl72/node4/nvlink64/50GBps",
        {"gpu": "gb200-nvl72", "num_gpus": 64},
        "gb200-nvl72/node4/nvlink72/50GBps",
    ),
    (
        "v100-sxm-32gb/node8/nvlink8/50GBps",
        {"node_type": "dgx-2", "num_gpus": 8},
        "v100-sxm-32gb/node16/nvlink16/50GBps",
    ),
    ("cpu/AMD EPYC/host-a", {"gpu": "cpu", "num_gpus": 2}, "cpu/AMD EPYC/host-a"),
    (
        "h100-sxm-80gb/node4/nvlink4/50GBps",
        "lab",
        "h100-sxm-80gb/node4/nvlink4/50GBps",
    ),  # a name that may be gone
)


def test_keys_name_the_whole_machine_after_an_upgrade(
    store_url: str, new_measurement: NewMeasurementFactory
) -> None:
    store = open_store(store_url)
    ids = [
        store.add_measurement(
            measurement=new_measurement(
                cluster_key=old, query={"kind": "training", "cluster": cluster}
            )
        ).id
        for old, cluster, _ in OLD_AND_NEW
    ]
    doubted = store.add_measurement(measurement=new_measurement()).id
    store.close()
    try:
        schema.downgrade(store_url, to="0008")
        engine = create_engine(store_url)
        with engine.begin() as connection:
            connection.execute(
                sa.update(measurements).where(measurements.c.id == doubted).values(trust=0.3)
            )
        engine.dispose()
    finally:
        schema.upgrade(store_url)
    store = open_store(store_url)
    assert [store.get_measurement(measurement_id=each).cluster_key for each in ids] == [
        new for _, _, new in OLD_AND_NEW
    ]
    assert {store.get_measurement(measurement_id=each).state for each in ids} == {"accepted"}
    assert store.get_measurement(measurement_id=doubted).state == "excluded"
    store.close()


@pytest.mark.parametrize(
    ("old", "cluster", "new"), [row for row in OLD_AND_NEW if isinstance(row[1], dict)]
)
def test_they_are_the_keys_of_todays_queries(old: str, cluster: dict[str, Any], new: str) -> None:
    from hp_tool import catalog
    from hp_tool.loop.learning.series import cluster_key, own_hardware

    if cluster.get("gpu") != "cpu":
        spec = catalog.cluster(ClusterQuery(**cluster, inter_node_bandwidth_bytes_per_second=50e9))
        assert cluster_key(spec, own_hardware(spec)) == new.removesuffix("/train.py")
