"""A coordinator's first steps, for tests of what comes after them."""

from __future__ import annotations

from collections.abc import Callable

from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig, Recompute
from hp_tool.domain.ports import Store
from hp_tool.domain.records import JsonObject, Lease, RunRecord

QUERY = {"model": "gpt-tiny", "cluster": {"gpu": "cpu", "num_gpus": 4}}
TP2 = ParallelConfig(
    tensor_parallel_size=2, sequence_parallel=True, recompute=Recompute(granularity="selective")
)
LONG_S = 60.0
SHORT_S = 0.02
NewMeasurementFactory = Callable[..., NewMeasurement]


def claimed(
    store: Store, *, lease_s: float = LONG_S, query: JsonObject = QUERY, **create: object
) -> Lease:
    """A new search, coordinated by this test."""
    search = store.create_search(query=query, **create)
    claim = store.claim_search(holder="test", lease_s=lease_s, search_id=search.id)
    assert claim is not None
    return claim[1]


def intended(store: Store, lease: Lease, parallel: ParallelConfig = TP2) -> RunRecord:
    return store.intend_run(
        lease=lease, parallel=parallel, fidelity=Fidelity(steps=3), predicted={"step_s": 1.0}
    )
