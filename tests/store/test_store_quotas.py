"""GPU-seconds of a day: what is used and promised, and that two searches admitted at once do not
share the same rest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import GpuSecondsLimit
from hp_tool.domain.states import SearchState
from hp_tool.errors import LimitError
from hp_tool.store import SqlStore

LIMIT = GpuSecondsLimit(per_day=100.0)


def query(budget: float) -> dict[str, object]:
    return {"search": {"budget_gpu_seconds": budget}}


def test_searches_admitted_at_once_stay_within_the_limit(store: SqlStore) -> None:
    def submit(_: int) -> bool:
        try:
            store.create_search(query=query(30.0), limits=(LIMIT,))
        except LimitError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(submit, range(8))) == 3
    assert store.gpu_seconds_today() == 90.0


def test_a_key_pays_for_its_own_searches_only(
    store: SqlStore, new_measurement: Callable[..., NewMeasurement]
) -> None:
    mine = GpuSecondsLimit(per_day=50.0, api_key_id="k1")
    search = store.create_search(
        query=query(50.0), owner="ada", api_key_id="k1", limits=(LIMIT, mine)
    )
    store.create_search(query=query(50.0), owner="bob", api_key_id="k2", limits=(LIMIT,))
    with pytest.raises(LimitError, match="this key has 0 of 50"):
        store.create_search(query=query(1.0), api_key_id="k1", limits=(mine,))
    with pytest.raises(LimitError, match="this service has 0 of 100"):
        store.create_search(query=query(1.0), api_key_id="k3", limits=(LIMIT,))
    claimed = store.claim_search(holder="test", lease_s=60, search_id=search.id)
    assert claimed is not None
    run = store.intend_run(
        lease=claimed[1], parallel=ParallelConfig(), fidelity=Fidelity(), predicted={}
    )
    finished = store.finish_run(
        lease=claimed[1], run_id=run.id, measurement=new_measurement(), gpu_seconds=20.0
    )
    assert finished.measurement_id is not None
    assert store.get_measurement(measurement_id=finished.measurement_id).owner == "ada"
    store.finish_search(lease=claimed[1], state=SearchState.FAILED, error={"code": "internal"})
    assert store.gpu_seconds_today(api_key_id="k1") == 20.0  # spent; the rest of its budget is free
    other = store.create_search(query=query(30.0), api_key_id="k1", limits=(mine,))
    with pytest.raises(
        LimitError, match="this key has 0 of 50 left"
    ):  # a failed one comes back with what it has left
        store.resume_search(search_id=search.id, limits=(mine,))
    store.request_cancel(search_id=other.id)
    assert store.resume_search(search_id=search.id, limits=(mine,)).state is SearchState.QUEUED


def test_a_clusters_limit_counts_the_searches_that_name_it(store: SqlStore) -> None:
    here = GpuSecondsLimit(per_day=100.0, cluster="mine")

    def on(cluster: object, budget: float) -> dict[str, object]:
        return query(budget) | {"cluster": cluster}

    store.create_search(query=on("mine", 40.0), limits=(here,))
    part = store.create_search(query=on({"node_type": "mine", "num_gpus": 8}, 40.0), limits=(here,))
    store.create_search(query=on({"gpu": "cpu", "num_gpus": 2}, 1e6))
    store.create_search(query=on("another", 1e6))
    with pytest.raises(LimitError, match="cluster mine has 20 of 100 left"):
        store.create_search(query=on("mine", 30.0), limits=(here,))
    claimed = store.claim_search(holder="test", lease_s=60, search_id=part.id)
    assert claimed is not None
    run = store.intend_run(
        lease=claimed[1], parallel=ParallelConfig(), fidelity=Fidelity(), predicted={}
    )
    assert (store.count_open_runs(cluster="mine"), store.count_open_runs(cluster="another")) == (
        1,
        0,
    )
    store.abandon_run(lease=claimed[1], run_id=run.id, cause="gone", gpu_seconds=20.0)
    assert store.count_open_runs(cluster="mine") == 0
    store.finish_search(lease=claimed[1], state=SearchState.FAILED, error={"code": "internal"})
    store.create_search(query=on("mine", 30.0), limits=(here,))  # 40 promised, 20 spent
