"""A small hand-made space with a known truth."""

from __future__ import annotations

from itertools import product

import numpy as np

from hp_tool.domain.units import GIB
from hp_tool.loop.search.table import CandidateTable

DEVICE_BYTES = 16.0 * GIB


def make_table() -> CandidateTable:
    """t, p in 1, 2, 4 with t p <= 8, sequence parallelism, recomputation, micro-batch size: 8
    devices, 16 micro-sequences.
    """
    rows = []
    for t, p, b, sp, recompute in product(
        (1, 2, 4), (1, 2, 4), (1, 2), (False, True), ("none", "selective", "full")
    ):
        if t * p > 8 or (sp and t == 1):
            continue
        d = 8 // (t * p)
        m = 16 / (d * b)
        rows.append((t, p, b, sp, recompute, d, m))
    t, p, b, sp, recompute, d, m = zip(*rows, strict=True)
    ta, pa, ba, da, ma = (np.array(x, dtype=float) for x in (t, p, b, d, m))
    spa = np.array(sp)
    extra = np.select(
        [np.array(recompute) == "selective", np.array(recompute) == "full"], [0.02, 0.33], 0.0
    )
    compute = 1.0 + 0.1 / ba
    memory = 8.0 / (ta * pa) + ba * 6.0 / ta * np.where(spa, 0.8, 1.0) * np.select(
        [extra == 0.02, extra > 0.3], [0.7, 0.2], 1.0
    )
    return CandidateTable(
        axes={
            "tensor_parallel_size": t,
            "pipeline_parallel_size": p,
            "micro_batch_size": b,
            "sequence_parallel": sp,
            "recompute": recompute,
        },
        parts_s={
            "compute": compute,
            "recompute": compute * extra,
            "tensor_parallel": 0.15 * (ta - 1.0) * np.where(spa, 0.9, 1.0),
            "pipeline_bubble": compute * (pa - 1.0) / ma,
            "data_parallel": 0.05 * (da - 1.0) / da,
            "optimizer": np.full(len(rows), 0.02),
        },
        layer_passes=ma * 8.0 / pa,
        memory_bytes=memory * GIB,
        usable_bytes=np.full(len(rows), 0.95 * DEVICE_BYTES),
        device_bytes=np.full(len(rows), DEVICE_BYTES),
    )


def true_step_s(
    table: CandidateTable, *, communication: float = 2.0, compute: float = 1.2, noise: float = 0.02
) -> np.ndarray:
    """A machine whose communication is slower than predicted, with a fixed error per row."""
    seconds = np.zeros(len(table))
    for name, part in table.parts_s.items():
        seconds += part * (
            communication if name in ("tensor_parallel", "data_parallel") else compute
        )
    return seconds * np.random.default_rng(7).lognormal(0.0, noise, len(table))
