"""What the port promises of runs: one for a configuration, finished once."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.states import RunState
from hp_tool.errors import ConflictError, InputError, NotFoundError
from tests.store.acting import LONG_S, SHORT_S, TP2, NewMeasurementFactory, claimed, intended


def test_a_run_from_intent_to_measurement(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    assert (run.state, run.number, run.attempt, run.parallel) == (RunState.INTENDED, 0, 0, TP2)
    assert run.job_name == f"hp-{lease.search_id}-r0-t1-{run.id}"
    assert run.digest == configuration_digest(parallel=TP2, fidelity=Fidelity(steps=3))
    assert (run.status, run.objective_s) == (None, None)
    submitted = store.mark_submitted(lease=lease, run_id=run.id, handle="job 7")
    assert (submitted.state, submitted.handle) == (RunState.SUBMITTED, "job 7")
    given = new_measurement()
    done = store.finish_run(lease=lease, run_id=run.id, measurement=given, gpu_seconds=12.5)
    assert (done.state, done.gpu_seconds, done.measurement) == (
        RunState.FINISHED,
        12.5,
        given.measurement,
    )
    assert (done.status, done.objective_s) == ("ok", given.measurement.step_s)
    assert store.runs(search_id=lease.search_id) == [done]
    assert done.measurement_id is not None
    kept = store.get_measurement(measurement_id=done.measurement_id)
    assert (kept.run_id, kept.search_id, kept.measurement) == (
        run.id,
        lease.search_id,
        given.measurement,
    )


def test_the_same_configuration_is_the_same_run_even_for_the_next_coordinator(store: Store) -> None:
    lease = claimed(store, lease_s=SHORT_S)
    run = intended(store, lease)
    assert intended(store, lease) == run
    time.sleep(2 * SHORT_S)
    claim = store.claim_search(holder="next", lease_s=LONG_S)
    assert claim is not None
    assert intended(store, claim[1]) == run
    other = intended(store, claim[1], ParallelConfig())
    assert (other.number, other.job_name) == (1, f"hp-{lease.search_id}-r1-t2-{other.id}")


def test_a_finished_run_is_finished_once(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    first = store.finish_run(
        lease=lease, run_id=run.id, measurement=new_measurement(step_s=1.0), gpu_seconds=1.0
    )
    again = store.finish_run(
        lease=lease, run_id=run.id, measurement=new_measurement(step_s=9.0), gpu_seconds=9.0
    )
    assert again == first == intended(store, lease)
    assert len(store.measurements().items) == 1
    assert (
        len(store.events(search_id=lease.search_id)) == 4
    )  # queued, running, intended, finished: once
    for change in (
        lambda: store.abandon_run(lease=lease, run_id=run.id, cause="late"),
        lambda: store.mark_submitted(lease=lease, run_id=run.id, handle="late"),
    ):
        with pytest.raises(ConflictError):
            change()


def test_an_abandoned_run_may_be_tried_again(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    gone = store.abandon_run(lease=lease, run_id=run.id, cause="preempted", gpu_seconds=4.0)
    assert (gone.state, gone.cause, gone.gpu_seconds) == (RunState.ABANDONED, "preempted", 4.0)
    with pytest.raises(ConflictError):
        store.finish_run(lease=lease, run_id=run.id, measurement=new_measurement(), gpu_seconds=1.0)
    second = intended(store, lease)
    assert (second.attempt, second.number, second.digest) == (1, 1, run.digest)
    assert [r.id for r in store.runs(search_id=lease.search_id)] == [run.id, second.id]


def test_a_measurement_that_cannot_be_stored_leaves_the_run_open(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    with pytest.raises(InputError):
        store.finish_run(
            lease=lease,
            run_id=run.id,
            measurement=new_measurement(step_s=float("nan")),
            gpu_seconds=1.0,
        )
    assert store.runs(search_id=lease.search_id) == [run]
    assert store.measurements().items == ()


def test_figures_are_those_of_the_runs(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    lease = claimed(store)
    predicted = {
        "step_s": 1.0,
        "calibrated_step_s": 1.25,
        "calibrated_step_s_interval": [1.0, 1.5],
        "memory_allocated_bytes": 2.0**40,
        "chosen_by": "best_expected",
    }
    reduced = Fidelity(num_hidden_layers=2)
    ids = [
        store.intend_run(
            lease=lease, parallel=ParallelConfig(data_parallel_size=n), fidelity=f, predicted=p
        ).id
        for n, f, p in ((1, Fidelity(), predicted), (2, reduced, {}), (4, Fidelity(), {}))
    ]
    implied = Measurement(status="ok", step_s=0.5, fidelity=reduced, extrapolated_step_s=2.0)
    store.finish_run(lease=lease, run_id=ids[0], measurement=new_measurement(), gpu_seconds=3.0)
    store.finish_run(
        lease=lease,
        run_id=ids[1],
        measurement=replace(new_measurement(), measurement=implied),
        gpu_seconds=1.0,
    )
    store.abandon_run(lease=lease, run_id=ids[2], cause="node lost")
    runs, figures = (
        store.runs(search_id=lease.search_id),
        store.run_figures(search_id=lease.search_id),
    )
    for run, told in zip(runs, figures, strict=True):
        measured = run.measurement
        assert (told.id, told.number, told.state, told.parallel) == (
            run.id,
            run.number,
            run.state,
            run.parallel,
        )
        assert (told.status, told.objective_s) == (
            (measured.status, measured.objective_s) if measured else (None, None)
        )
        assert told.peak_memory_bytes == (measured.peak_memory_bytes if measured else None)
    first, _, last = figures
    assert (first.predicted_step_s, first.expected_step_s, first.expected_step_s_interval) == (
        1.0,
        1.25,
        (1.0, 1.5),
    )
    assert (first.predicted_memory_bytes, first.chosen_by, first.gpu_seconds) == (
        2.0**40,
        "best_expected",
        3.0,
    )
    assert (last.cause, last.predicted_step_s, last.expected_step_s_interval) == (
        "node lost",
        None,
        None,
    )
    assert store.get_run(search_id=lease.search_id, run_id=ids[1]) == runs[1]
    with pytest.raises(NotFoundError):
        store.get_run(search_id=claimed(store).search_id, run_id=ids[1])
    with pytest.raises(NotFoundError):
        store.run_figures(search_id="0" * 16)


def test_a_lease_reaches_only_its_own_runs(store: Store) -> None:
    run = intended(store, claimed(store))
    with pytest.raises(NotFoundError):
        store.mark_submitted(lease=claimed(store), run_id=run.id, handle="h")
