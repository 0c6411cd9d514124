"""A lease and a few stored facts stand for a worker, so that pages and routes can be looked at in
any state.
"""

from __future__ import annotations

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.records import JsonObject, Lease
from hp_tool.domain.result import Estimate, Recommendation, SpaceSummary, TimeEstimate
from hp_tool.domain.states import SearchState
from hp_tool.loop.search.account import progress_of
from hp_tool.loop.tuning import SearchSummary, TuneResult
from hp_tool.questions.schema import to_dict


def claim(store: Store, search_id: str) -> Lease:
    claimed = store.claim_search(holder="test", lease_s=60, search_id=search_id)
    assert claimed is not None
    return claimed[1]


def one_run(
    store: Store,
    lease: Lease,
    measurement: Measurement,
    parallel: ParallelConfig | None = None,
    *,
    predicted: JsonObject | None = None,
) -> str:
    parallel = parallel or ParallelConfig(data_parallel_size=2)
    run = store.intend_run(
        lease=lease, parallel=parallel, fidelity=Fidelity(), predicted=predicted or {"step_s": 0.5}
    )
    store.mark_submitted(lease=lease, run_id=run.id, handle="42")
    end_run(store, lease, run.id, measurement, parallel)
    return run.id


def end_run(
    store: Store,
    lease: Lease,
    run_id: str,
    measurement: Measurement,
    parallel: ParallelConfig,
) -> None:
    new = NewMeasurement(
        source="profile",
        cluster_key="cpu",
        gpu="cpu",
        framework="megatron-core",
        model="gpt-tiny",
        query={},
        parallel=parallel,
        measurement=measurement,
        predicted={"step_s": 0.5},
    )
    store.finish_run(lease=lease, run_id=run_id, measurement=new, gpu_seconds=12.0)
    runs = store.runs(search_id=lease.search_id)
    store.set_progress(lease=lease, progress=progress_of(runs, budget_runs=4, expected_gain=None))


def finish(store: Store, lease: Lease) -> None:
    """End the search as succeeded; its result recommends what was measured before what failed."""

    def estimate(step_s: float) -> Estimate:
        return Estimate(
            feasible=True,
            time=TimeEstimate(step_s=step_s, parts_s={}),
            tokens_per_second_per_gpu=512 / step_s,
        )

    runs = store.runs(search_id=lease.search_id)
    rows = tuple(
        Recommendation(
            rank=place + 1,
            parallel=run.parallel,
            estimate=estimate(0.5),
            calibrated_estimate=estimate(0.41),
            measurement=run.measurement
            if run.measurement and run.measurement.status == "ok"
            else None,
        )
        for place, run in enumerate(
            sorted(runs, key=lambda run: run.measurement is None or run.measurement.status != "ok")
        )
    ) or (
        Recommendation(
            rank=1, parallel=ParallelConfig(data_parallel_size=2), estimate=estimate(0.5)
        ),
    )
    result = TuneResult(
        id="small",
        query=store.get_search(search_id=lease.search_id).query,
        recommendations=rows,
        space=SpaceSummary(legal=20, feasible=18, seconds=0.01),
        rejections={"heads_not_divisible": 2},
        search=SearchSummary(
            id=lease.search_id,
            state=SearchState.SUCCEEDED,
            profile_runs=len(runs),
            gpu_seconds=12.0 * len(runs),
            grid_gpu_seconds=216.0,
            stopped_because="no_expected_gain",
        ),
    )
    progress = store.get_search(search_id=lease.search_id).progress
    store.set_progress(lease=lease, progress=progress | {"grid_gpu_seconds": 216.0})
    store.finish_search(
        lease=lease,
        state=SearchState.SUCCEEDED,
        stopped_because="no_expected_gain",
        result=to_dict(result),
    )
