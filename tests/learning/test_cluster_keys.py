"""Measurements of small jobs are filed under the whole machine that the job used a part of."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool import catalog
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.loop.learning.series import cluster_key, own_hardware


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"gpu": "h100-sxm-80gb", "num_gpus": 4}, "h100-sxm-80gb/node8/nvlink8/50GBps"),
        ({"gpu": "h100-sxm-80gb", "num_gpus": 16}, "h100-sxm-80gb/node8/nvlink8/50GBps"),
        (
            {"gpu": "h100-sxm-80gb", "num_gpus": 16, "gpus_per_node": 4},
            "h100-sxm-80gb/node4/nvlink4/50GBps",
        ),
        ({"gpu": "gb200-nvl72", "num_gpus": 8}, "gb200-nvl72/node4/nvlink72/50GBps"),
        ({"gpu": "gb200-nvl72", "num_gpus": 64}, "gb200-nvl72/node4/nvlink72/50GBps"),
        ({"node_type": "dgx-2", "num_gpus": 8}, "v100-sxm-32gb/node16/nvlink16/50GBps"),
    ],
)
def test_keys_name_the_whole_machine(cluster: dict[str, Any], key: str) -> None:
    spec = catalog.cluster(ClusterQuery(**cluster, inter_node_bandwidth_bytes_per_second=50e9))
    assert cluster_key(spec, own_hardware(spec)) == key
