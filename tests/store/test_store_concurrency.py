"""Many processes and threads on one store: nobody fails for want of a lock, nothing happens
twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import Lease, OpenRunsLimit
from hp_tool.domain.states import SearchState
from hp_tool.errors import LimitError
from hp_tool.store import SqlStore, open_store, schema
from tests.forked import FORKED

PROCESSES = 4
THREADS = 8
SEARCHES = 20


def coordinate_all(url: str, holder: str) -> list[str]:
    """What a worker process does: claim, run one configuration, finish; until there is nothing
    left.
    """
    store = open_store(url)
    mine = []
    while claim := store.claim_search(holder=holder, lease_s=60.0):
        search, lease = claim
        run = store.intend_run(
            lease=lease, parallel=ParallelConfig(), fidelity=Fidelity(), predicted={}
        )
        store.renew_lease(lease=lease, lease_s=60.0)
        store.abandon_run(lease=lease, run_id=run.id, cause="a test")
        store.finish_search(lease=lease, state=SearchState.SUCCEEDED)
        mine.append(search.id)
    store.close()
    return mine


def open_and_count(url: str) -> int:
    store = open_store(url)
    store.create_search(query={})
    store.close()
    return 1


def processes() -> ProcessPoolExecutor:
    # Not forked from this process: they would share connections, which neither database allows.
    return ProcessPoolExecutor(PROCESSES, mp_context=FORKED)


def test_every_search_is_claimed_by_one_process(store: SqlStore, store_url: str) -> None:
    made = {store.create_search(query={"number": number}).id for number in range(SEARCHES)}
    with processes() as pool:
        claims = list(
            pool.map(
                coordinate_all, [store_url] * PROCESSES, [f"worker {n}" for n in range(PROCESSES)]
            )
        )
    assert Counter(search_id for claim in claims for search_id in claim) == Counter(made)
    assert store.usage().searches[SearchState.SUCCEEDED] == SEARCHES
    for search_id in made:
        search = store.get_search(search_id=search_id)
        assert [event.seq for event in store.events(search_id=search.id)] == [1, 2, 3, 4, 5]


def test_processes_may_create_the_same_sqlite_file_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/store.sqlite3"
    with processes() as pool:
        assert sum(pool.map(open_and_count, [url] * 2 * PROCESSES)) == 2 * PROCESSES
    assert schema.current(url) == schema.HEAD
    assert len(open_store(url).list_searches().items) == 2 * PROCESSES


def test_threads_racing_for_one_search_get_one_lease(store: SqlStore) -> None:
    search = store.create_search(query={})
    with ThreadPoolExecutor(THREADS) as pool:
        claims = pool.map(
            lambda n: store.claim_search(holder=f"{n}", lease_s=60.0, search_id=search.id),
            range(THREADS),
        )
    assert [claim[1].token for claim in claims if claim] == [1]


def test_threads_racing_with_one_run_store_it_once(
    store: SqlStore, new_measurement: Callable[..., NewMeasurement]
) -> None:
    store.create_search(query={})
    claim = store.claim_search(holder="w", lease_s=60.0)
    assert claim is not None
    lease = claim[1]

    def whole_run(number: int) -> str | None:
        run = store.intend_run(
            lease=lease, parallel=ParallelConfig(), fidelity=Fidelity(), predicted={}
        )
        measurement = new_measurement(step_s=number + 1.0)
        return store.finish_run(
            lease=lease, run_id=run.id, measurement=measurement, gpu_seconds=1.0
        ).measurement_id

    with ThreadPoolExecutor(THREADS) as pool:
        assert len(set(pool.map(whole_run, range(THREADS)))) == 1
    assert len(store.runs(search_id=lease.search_id)) == len(store.measurements().items) == 1


def test_searches_racing_for_a_clusters_last_places_get_no_more(store: SqlStore) -> None:
    leases = []
    for n in range(THREADS):
        search = store.create_search(
            query={"cluster": "busy" if n % 2 else {"node_type": "busy", "num_gpus": 2}}
        )
        claim = store.claim_search(holder="w", lease_s=60.0, search_id=search.id)
        assert claim is not None
        leases.append(claim[1])
    limit = OpenRunsLimit(cluster="busy", runs=3)

    def intend(lease: Lease) -> str | None:
        try:
            run = store.intend_run(
                lease=lease,
                parallel=ParallelConfig(),
                fidelity=Fidelity(),
                predicted={},
                limit=limit,
            )
        except LimitError as full:
            assert full.code == "cluster_full"
            return None
        return run.id

    with ThreadPoolExecutor(THREADS) as pool:
        first = list(pool.map(intend, leases))
    assert len([run for run in first if run]) == store.count_open_runs(cluster="busy") == 3
    assert [
        intend(lease) for lease in leases
    ] == first  # what is intended stays so on a full cluster


def test_threads_with_one_idempotency_key_make_one_search(store: SqlStore) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        made = pool.map(
            lambda _: store.create_search(query={"a": 1}, idempotency_key="k").id, range(THREADS)
        )
        assert len(set(made)) == 1
    assert store.usage().searches[SearchState.QUEUED] == 1


def test_threads_saving_calibrations_get_different_versions(store: SqlStore) -> None:
    def save(number: int) -> int:
        return store.save_calibration(
            cluster_key="c", framework="f", payload={}, num_measurements=number
        ).version

    with ThreadPoolExecutor(THREADS) as pool:
        assert sorted(pool.map(save, range(THREADS))) == list(range(1, THREADS + 1))
