"""A lease and a few stored facts stand for a worker, so that pages and routes can be looked at in any state."""

from __future__ import annotations

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.records import Lease, NewMeasurement, SearchState
from hp_tool.schema import to_dict


def claim(store: Store, search_id: str) -> Lease:
    claimed = store.claim_search(holder="test", lease_s=60, search_id=search_id)
    assert claimed is not None
    return claimed[1]


def one_run(store: Store, lease: Lease, measurement: Measurement, parallel: ParallelConfig | None = None) -> str:
    parallel = parallel or ParallelConfig(data_parallel_size=2)
    run = store.intend_run(lease=lease, parallel=parallel, fidelity=Fidelity(), predicted={"step_s": 0.5})
    store.mark_submitted(lease=lease, run_id=run.id, handle="42")
    new = NewMeasurement(
        source="profile", cluster_key="cpu", gpu="cpu", framework="megatron-core", model="gpt-tiny", query={},
        parallel=parallel, measurement=measurement, predicted={"step_s": 0.5},
    )  # fmt: skip
    store.finish_run(lease=lease, run_id=run.id, measurement=new, gpu_seconds=12.0)
    return run.id


def finish(store: Store, lease: Lease, parallel: ParallelConfig | None = None) -> None:
    row = {
        "rank": 1,
        "parallel": to_dict(parallel or ParallelConfig(data_parallel_size=2)),
        "calibrated_estimate": {"time": {"step_s": 0.41}},
    }
    result = {"id": "small", "status": "ok", "recommendations": [row]}
    store.finish_search(lease=lease, state=SearchState.SUCCEEDED, stopped_because="budget_runs", result=result)
