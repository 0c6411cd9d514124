"""What context parallelism costs where links take no time: ring attention's own kernels and copies,
and nothing else.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from hp_tool import catalog
from hp_tool.questions import schema, training

LAYERS, HIDDEN, KEYS_VALUES = 32, 4096, 2 * 1024
"""Of llama-3-8b, whose queries are as wide as its hidden states."""
FREE = (
    "nvlink_bandwidth_bytes_per_second",
    "pcie_bandwidth_bytes_per_second",
    "inter_node_bandwidth_bytes_per_second",
)


def seconds(ranks: int, length: int) -> Any:
    gpu = asdict(catalog.gpu("h100-sxm-80gb")) | dict.fromkeys(FREE, 1e18) | {"name": "free-links"}
    query = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {
            "gpu": gpu,
            "num_gpus": 8,
            "inter_node_bandwidth_bytes_per_second": 1e18,
            "inter_node_latency_s": 0,
        },
        "training": {"sequence_length": length, "global_batch_size": 8},
        "parallel": {"context_parallel_size": ranks, "recompute": "none"},
    }
    return training.estimate(query=schema.parse_query(query), with_fixes=False).time


@pytest.mark.parametrize("length", [8192, 32768, 131072])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_free_links_leave_the_kernels_and_copies_of_the_ring(ranks: int, length: int) -> None:
    """Each token and step move no more than 40 bytes a query and 30 a key or value, at half the
    memory's peak bandwidth, and at most 20 kernels of 20 us start for each step, layer and
    micro-batch.
    """
    spent = seconds(ranks, length).parts_s["context_parallel"]
    tokens, micro_batches = length / ranks, ranks
    moved = tokens * (40.0 * HIDDEN + 30.0 * KEYS_VALUES) / (0.5 * 3.35e12)
    assert 0.0 < spent <= LAYERS * micro_batches * ranks * (moved + 20 * 20e-6)


def test_the_share_of_the_ring_falls_as_sequences_grow() -> None:
    shares = [
        (time := seconds(4, length)).parts_s["context_parallel"] / time.step_s
        for length in (8192, 32768, 131072)
    ]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 0.02
