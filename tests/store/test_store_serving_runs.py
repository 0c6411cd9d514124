"""Serving runs are stored and read as what they are."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import sqlalchemy as sa

from hp_tool.domain.measurement import Fidelity, LoadLatencies, Measurement, ServingTimes
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.states import SearchState
from hp_tool.store import open_store, schema
from hp_tool.store.engine import create_engine
from hp_tool.store.tables import measurements

QUERY = {
    "kind": "inference",
    "model": "gpt",
    "cluster": "named",
    "inference": {"concurrency": 16, "output_length": 5},
    "parallel": {"max_num_batched_tokens": [2048]},
}
CONFIG = ServingConfig(
    tensor_parallel_size=2, data_parallel_size=3, max_num_seqs=4, max_num_batched_tokens=2048
)
REPLICA = ParallelConfig(tensor_parallel_size=2, micro_batch_size=4)
TIMES = ServingTimes(
    ttft_s=0.5,
    ttft_s_spread=0.0,
    tpot_s=0.375,
    tpot_s_spread=0.0,
    ttft_times_s=(0.5, 0.6),
    tpot_times_s=(0.375, 0.4),
    output_tokens_per_second=10.0,
    runner="vllm",
)
# A batch of 4 x 5 tokens takes 2 s; of 16 / 3 requests a third has to wait for it.
LOAD = LoadLatencies(
    ttft_s=pytest.approx(2 / 3 + 0.5),
    tpot_s=0.375,
    request_latency_s=pytest.approx(2 / 3 + 2.0),
    penalised_latency_s=7.5,
    request_latencies_s=(2.0, 2.2),
)
PREDICTED = {"step_s": 4.0, "tokens_per_second_per_gpu": 16 * 5 / 6 / 4.0}


def stored_measurement(url: str, search_id: str) -> Any:
    """Return the measurement of a search's run, as it lies in the database."""
    query = sa.select(measurements.c.measurement).where(measurements.c.search_id == search_id)
    engine = create_engine(url)
    with engine.begin() as connection:
        stored = connection.execute(query.where(measurements.c.run_id.is_not(None))).scalar_one()
    engine.dispose()
    return stored


def add_search(url: str) -> str:
    """A succeeded search with one serving run, stored as it is today, and a training's measurement
    beside it.
    """
    store = open_store(url)
    search = store.create_search(query=QUERY).id
    claimed = store.claim_search(holder="here", lease_s=60.0, search_id=search)
    assert claimed is not None
    lease = claimed[1]
    fidelity = Fidelity(steps=2)
    run = store.intend_run(lease=lease, parallel=CONFIG, fidelity=fidelity, predicted=PREDICTED)
    load = replace(LOAD, ttft_s=2 / 3 + 0.5, request_latency_s=2 / 3 + 2.0)
    outcome = Measurement(status="ok", serving=TIMES, load=load, fidelity=fidelity)
    new = NewMeasurement(
        source="profile",
        cluster_key="one",
        gpu="cpu",
        framework="vllm-serving",
        model="gpt",
        query=QUERY,
        parallel=CONFIG,
        measurement=outcome,
        predicted=PREDICTED,
    )
    store.finish_run(lease=lease, run_id=run.id, measurement=new, gpu_seconds=1.0)
    training = replace(new, framework="megatron-core", query={"kind": "training"}, parallel=REPLICA)
    store.add_measurement(
        measurement=replace(training, measurement=Measurement(status="ok", step_s=1.0))
    )
    store.set_progress(
        lease=lease, progress={"best_run_id": run.id, "best_parallel": asdict(CONFIG)}
    )
    measured = stored_measurement(url, search)
    rows = [
        {"parallel": asdict(CONFIG), "measurement": measured},
        {"parallel": asdict(CONFIG), "measurement": None},
    ]
    store.finish_search(
        lease=lease,
        state=SearchState.SUCCEEDED,
        result={"recommendations": rows[:1], "nearest_misses": rows[1:]},
    )
    store.close()
    return search


def test_a_way_to_serve_is_stored_and_read_as_one(url: str) -> None:
    schema.upgrade(url)
    search = add_search(url)
    store = open_store(url)
    (run,), (figures,) = store.runs(search_id=search), store.run_figures(search_id=search)
    trained, served = sorted(store.measurements().items, key=lambda record: record.framework)
    store.close()
    assert (
        run.parallel == figures.parallel == served.parallel == CONFIG
        and trained.parallel == REPLICA
    )
    assert (
        run.measurement is not None
        and run.measurement.step_s is None
        and run.measurement.load == LOAD
    )
    assert figures.objective_s == run.measurement.objective_s == 7.5
    assert (
        figures.latencies is not None
        and figures.latencies.request_latency_s == LOAD.request_latency_s
    )
