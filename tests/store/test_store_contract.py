"""What the port promises, on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig, Recompute
from hp_tool.domain.ports import Store
from hp_tool.domain.records import Lease, NewMeasurement, RunRecord, RunState, SearchState
from hp_tool.errors import ConflictError, InputError, NotFoundError

QUERY = {"model": "gpt-tiny", "cluster": {"gpu": "cpu", "num_gpus": 4}}
TP2 = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, recompute=Recompute(granularity="selective"))
LONG_S = 60.0
SHORT_S = 0.02
NewMeasurementFactory = Callable[..., NewMeasurement]


def claimed(store: Store, *, lease_s: float = LONG_S, **create: object) -> Lease:
    """A new search, coordinated by this test."""
    search = store.create_search(query=QUERY, **create)
    claim = store.claim_search(holder="test", lease_s=lease_s, search_id=search.id)
    assert claim is not None
    return claim[1]


def intended(store: Store, lease: Lease, parallel: ParallelConfig = TP2) -> RunRecord:
    return store.intend_run(lease=lease, parallel=parallel, fidelity=Fidelity(steps=3), predicted={"step_s": 1.0})


class TestSearches:
    def test_a_new_search_waits_in_the_queue_with_its_query(self, store: Store) -> None:
        made = store.create_search(query=QUERY, owner="ada", priority=3)
        assert store.get_search(search_id=made.id) == made
        assert (made.state, made.query, made.owner, made.priority, made.lease) == (SearchState.QUEUED, QUERY, "ada", 3, None)
        assert abs(made.created_at - datetime.now(UTC)) < timedelta(seconds=10)

    def test_an_unknown_search_is_not_found(self, store: Store) -> None:
        for read in (store.get_search, store.runs, store.events, store.request_cancel, store.resume_search):
            with pytest.raises(NotFoundError, match="no search 'nope'"):
                read(search_id="nope")

    def test_pages_cover_all_searches_once_newest_first(self, store: Store) -> None:
        made = [store.create_search(query=QUERY, owner="ada").id for _ in range(7)]
        store.create_search(query=QUERY, owner="bob")
        seen, cursor = [], None
        while True:
            page = store.list_searches(owner="ada", limit=3, cursor=cursor)
            seen += [search.id for search in page.items]
            if (cursor := page.next_cursor) is None:
                break
        assert seen == made[::-1]

    @pytest.mark.parametrize("cursor", ["", "nonsense", "MjAyNg", "ÿ"])
    def test_a_made_up_cursor_is_bad_input(self, store: Store, cursor: str) -> None:
        with pytest.raises(InputError) as caught:
            store.list_searches(cursor=cursor)
        assert caught.value.field == "cursor"

    @pytest.mark.parametrize("limit", [0, -1, 10**9])
    def test_limits_are_bounded(self, store: Store, limit: int) -> None:
        with pytest.raises(InputError):
            store.list_searches(limit=limit)

    def test_lists_filter_by_state_and_leave_results_out(self, store: Store) -> None:
        lease = claimed(store)
        store.create_search(query=QUERY)
        store.finish_search(lease=lease, state=SearchState.SUCCEEDED, result={"recommendations": []})
        (ended,) = store.list_searches(state=SearchState.SUCCEEDED).items
        assert (ended.id, ended.result) == (lease.search_id, None)
        assert store.get_search(search_id=lease.search_id).result == {"recommendations": []}
        counts = store.count_searches()
        assert counts == {state: int(state in (SearchState.QUEUED, SearchState.SUCCEEDED)) for state in SearchState}

    def test_lists_filter_by_what_is_asked_for(self, store: Store) -> None:
        own = {"name": "mine" * 60, "num_hidden_layers": 2}
        asked = (QUERY | {"kind": "training"}, QUERY | {"kind": "inference"}, QUERY | {"kind": "training", "model": own}, {})
        a, b, c, d = (store.create_search(query=query).id for query in asked)

        def found(**filters: str) -> list[str]:
            return [search.id for search in store.list_searches(**filters).items]

        assert found(kind="training") == [c, a] and found(kind="inference") == [b]
        assert found(model="gpt-tiny") == [b, a] and found(model="gpt") == []
        assert found(model="mine" * 50) == [c]  # a name is kept as far as the column goes
        assert found(model="gpt-tiny", kind="training") == [a]
        assert d in found()

    def test_an_idempotency_key_makes_one_search(self, store: Store) -> None:
        first = store.create_search(query=QUERY, owner="ada", idempotency_key="k")
        assert store.create_search(query=dict(reversed(QUERY.items())), owner="ada", idempotency_key="k") == first
        assert store.create_search(query=QUERY, owner="bob", idempotency_key="k").id != first.id
        with pytest.raises(ConflictError):
            store.create_search(query=QUERY | {"model": "other"}, owner="ada", idempotency_key="k")
        with pytest.raises(ConflictError):
            store.create_search(query=QUERY, priority=1, owner="ada", idempotency_key="k")
        assert store.count_searches()[SearchState.QUEUED] == 2

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_a_number_that_json_does_not_know_is_refused(self, store: Store, number: float) -> None:
        with pytest.raises(InputError, match="query"):
            store.create_search(query={"training": {"x": [number]}})
        assert store.list_searches().items == ()

    @pytest.mark.parametrize("owner", ["x" * 201, "a\0b"])
    def test_text_that_a_column_cannot_hold_is_refused(self, store: Store, owner: str) -> None:
        with pytest.raises(InputError) as caught:
            store.create_search(query=QUERY, owner=owner)
        assert caught.value.field == "owner"


class TestCoordination:
    def test_claims_go_by_priority_then_age(self, store: Store) -> None:
        first, _, urgent = (store.create_search(query=QUERY, priority=p).id for p in (0, 0, 5))
        order = [store.claim_search(holder="w", lease_s=LONG_S) for _ in range(2)]
        assert [claim[0].id for claim in order if claim] == [urgent, first]

    def test_nothing_to_claim(self, store: Store) -> None:
        assert store.claim_search(holder="w", lease_s=LONG_S) is None
        claimed(store)
        store.create_search(query=QUERY, paused=True)
        assert store.claim_search(holder="w", lease_s=LONG_S) is None

    def test_a_paused_search_is_taken_only_by_its_id(self, store: Store) -> None:
        search = store.create_search(query=QUERY, paused=True)
        claim = store.claim_search(holder="me", lease_s=LONG_S, search_id=search.id)
        assert claim is not None
        assert (claim[0].state, claim[0].lease, claim[1].token) == (SearchState.RUNNING, claim[1], 1)
        assert store.claim_search(holder="other", lease_s=LONG_S, search_id=search.id) is None

    def test_an_expired_lease_is_taken_over_and_its_late_holder_changes_nothing(
        self, store: Store, new_measurement: NewMeasurementFactory
    ) -> None:
        late = claimed(store, lease_s=SHORT_S)
        run = intended(store, late)
        time.sleep(2 * SHORT_S)
        claim = store.claim_search(holder="next", lease_s=LONG_S)
        assert claim is not None
        search, lease = claim
        assert (search.id, lease.token) == (late.search_id, late.token + 1)
        before = (store.get_search(search_id=search.id), store.runs(search_id=search.id), store.events(search_id=search.id))
        writes = [
            lambda: store.renew_lease(lease=late, lease_s=LONG_S),
            lambda: store.release_search(lease=late),
            lambda: store.finish_search(lease=late, state=SearchState.FAILED),
            lambda: store.set_progress(lease=late, progress={"done": 1}),
            lambda: store.append_event(lease=late, kind="log", payload={}),
            lambda: intended(store, late, ParallelConfig()),
            lambda: store.mark_submitted(lease=late, run_id=run.id, handle="7"),
            lambda: store.abandon_run(lease=late, run_id=run.id, cause="late"),
            lambda: store.finish_run(lease=late, run_id=run.id, measurement=new_measurement(), gpu_seconds=1.0),
        ]
        for write in writes:
            with pytest.raises(ConflictError) as caught:
                write()
            assert caught.value.code == "lease_lost"
        after = (store.get_search(search_id=search.id), store.runs(search_id=search.id), store.events(search_id=search.id))
        assert after == before
        assert store.measurements().items == ()

    def test_an_expired_lease_that_nobody_took_still_writes(self, store: Store) -> None:
        lease = claimed(store, lease_s=SHORT_S)
        time.sleep(2 * SHORT_S)
        store.set_progress(lease=lease, progress={"done": 1})
        renewed = store.renew_lease(lease=lease, lease_s=LONG_S)
        assert renewed.progress == {"done": 1}
        assert renewed.lease is not None
        assert renewed.lease.token == lease.token
        assert store.claim_search(holder="w", lease_s=LONG_S) is None

    def test_a_released_search_waits_for_the_next_with_its_first_start_kept(self, store: Store) -> None:
        lease = claimed(store)
        started = store.get_search(search_id=lease.search_id).started_at
        assert store.release_search(lease=lease).state is SearchState.QUEUED
        with pytest.raises(ConflictError):
            store.renew_lease(lease=lease, lease_s=LONG_S)
        claim = store.claim_search(holder="next", lease_s=LONG_S)
        assert claim is not None
        assert (claim[1].token, claim[0].started_at) == (2, started)

    def test_finishing_stores_the_outcome_and_ends_the_lease(self, store: Store) -> None:
        lease = claimed(store)
        ended = store.finish_search(lease=lease, state=SearchState.FAILED, stopped_because="error", error={"code": "internal"})
        assert (ended.state, ended.stopped_because, ended.error, ended.lease) == ("failed", "error", {"code": "internal"}, None)
        assert ended.finished_at is not None
        with pytest.raises(ConflictError):
            store.finish_search(lease=lease, state=SearchState.SUCCEEDED)

    def test_a_search_ends_only_in_a_final_state(self, store: Store) -> None:
        with pytest.raises(InputError):
            store.finish_search(lease=claimed(store), state=SearchState.PAUSED)

    def test_success_leaves_no_open_run_behind(self, store: Store) -> None:
        lease = claimed(store)
        run = intended(store, lease)
        for state in (SearchState.SUCCEEDED, SearchState.CANCELLED):
            with pytest.raises(ConflictError, match="1 open run"):
                store.finish_search(lease=lease, state=state)
        store.abandon_run(lease=lease, run_id=run.id, cause="not needed")
        assert store.finish_search(lease=lease, state=SearchState.SUCCEEDED).state is SearchState.SUCCEEDED


class TestSteering:
    def test_a_waiting_search_is_cancelled_at_once(self, store: Store) -> None:
        search = store.create_search(query=QUERY)
        for _ in range(2):
            cancelled = store.request_cancel(search_id=search.id)
            assert (cancelled.state, cancelled.stopped_because) == (SearchState.CANCELLED, "cancelled")
        assert store.claim_search(holder="w", lease_s=LONG_S) is None

    def test_a_running_search_is_asked(self, store: Store) -> None:
        lease = claimed(store)
        assert store.request_cancel(search_id=lease.search_id).state is SearchState.RUNNING
        assert store.renew_lease(lease=lease, lease_s=LONG_S).requested == "cancel"
        for steer in (store.request_pause, store.resume_search):
            with pytest.raises(ConflictError):
                steer(search_id=lease.search_id)
        ended = store.finish_search(lease=lease, state=SearchState.CANCELLED)
        assert (ended.state, ended.requested) == (SearchState.CANCELLED, None)

    def test_cancelling_a_waiting_search_with_open_runs_sends_a_coordinator_to_end_them(self, store: Store) -> None:
        lease = claimed(store)
        intended(store, lease)
        store.release_search(lease=lease, paused=True)
        assert store.request_cancel(search_id=lease.search_id).state is SearchState.QUEUED
        claim = store.claim_search(holder="w", lease_s=LONG_S)
        assert claim is not None
        assert claim[0].requested == "cancel"
        assert store.release_search(lease=claim[1], paused=True).state is SearchState.QUEUED  # still to be carried out

    def test_pause_and_resume(self, store: Store) -> None:
        lease = claimed(store)
        assert store.request_pause(search_id=lease.search_id).requested == "pause"
        assert store.resume_search(search_id=lease.search_id).requested is None
        store.request_pause(search_id=lease.search_id)
        paused = store.release_search(lease=lease)
        assert (paused.state, paused.requested) == (SearchState.PAUSED, None)
        assert store.resume_search(search_id=lease.search_id).state is SearchState.QUEUED
        assert store.request_pause(search_id=lease.search_id).state is SearchState.PAUSED

    def test_a_failed_search_may_be_resumed_and_an_ended_one_not_steered(self, store: Store) -> None:
        lease = claimed(store)
        store.finish_search(lease=lease, state=SearchState.FAILED, error={"code": "internal"})
        again = store.resume_search(search_id=lease.search_id)
        assert (again.state, again.error, again.finished_at) == (SearchState.QUEUED, None, None)
        claim = store.claim_search(holder="w", lease_s=LONG_S)
        assert claim is not None
        store.finish_search(lease=claim[1], state=SearchState.SUCCEEDED)
        for steer in (store.request_cancel, store.request_pause, store.resume_search):
            with pytest.raises(ConflictError):
                steer(search_id=lease.search_id)

    def test_events_tell_the_story_without_gaps(self, store: Store) -> None:
        lease = claimed(store)
        intended(store, lease)
        store.append_event(lease=lease, kind="calibrated", payload={"error": 0.1})
        store.finish_search(lease=lease, state=SearchState.FAILED)
        events = store.events(search_id=lease.search_id)
        assert [event.seq for event in events] == [1, 2, 3, 4, 5]
        told = [(event.kind, event.payload.get("state")) for event in events]
        assert told == [
            ("state", "queued"),
            ("state", "running"),
            ("run", "intended"),
            ("calibrated", None),
            ("state", "failed"),
        ]
        assert store.events(search_id=lease.search_id, after=3, limit=1) == [events[3]]
        assert store.events(search_id=lease.search_id, after=5) == []


class TestRuns:
    def test_a_run_from_intent_to_measurement(self, store: Store, new_measurement: NewMeasurementFactory) -> None:
        lease = claimed(store)
        run = intended(store, lease)
        assert (run.state, run.number, run.attempt, run.parallel) == (RunState.INTENDED, 0, 0, TP2)
        assert run.job_name == f"hp-{lease.search_id}-r0-t1"
        assert run.digest == configuration_digest(parallel=TP2, fidelity=Fidelity(steps=3))
        submitted = store.mark_submitted(lease=lease, run_id=run.id, handle="job 7")
        assert (submitted.state, submitted.handle) == (RunState.SUBMITTED, "job 7")
        given = new_measurement()
        done = store.finish_run(lease=lease, run_id=run.id, measurement=given, gpu_seconds=12.5)
        assert (done.state, done.gpu_seconds, done.measurement) == (RunState.FINISHED, 12.5, given.measurement)
        assert store.runs(search_id=lease.search_id) == [done]
        assert done.measurement_id is not None
        kept = store.get_measurement(measurement_id=done.measurement_id)
        assert (kept.run_id, kept.search_id, kept.measurement) == (run.id, lease.search_id, given.measurement)

    def test_the_same_configuration_is_the_same_run_even_for_the_next_coordinator(self, store: Store) -> None:
        lease = claimed(store, lease_s=SHORT_S)
        run = intended(store, lease)
        assert intended(store, lease) == run
        time.sleep(2 * SHORT_S)
        claim = store.claim_search(holder="next", lease_s=LONG_S)
        assert claim is not None
        assert intended(store, claim[1]) == run
        other = intended(store, claim[1], ParallelConfig())
        assert (other.number, other.job_name) == (1, f"hp-{lease.search_id}-r1-t2")

    def test_a_finished_run_is_finished_once(self, store: Store, new_measurement: NewMeasurementFactory) -> None:
        lease = claimed(store)
        run = intended(store, lease)
        first = store.finish_run(lease=lease, run_id=run.id, measurement=new_measurement(step_s=1.0), gpu_seconds=1.0)
        again = store.finish_run(lease=lease, run_id=run.id, measurement=new_measurement(step_s=9.0), gpu_seconds=9.0)
        assert again == first == intended(store, lease)
        assert len(store.measurements().items) == 1
        assert len(store.events(search_id=lease.search_id)) == 4  # queued, running, intended, finished: once
        for change in (
            lambda: store.abandon_run(lease=lease, run_id=run.id, cause="late"),
            lambda: store.mark_submitted(lease=lease, run_id=run.id, handle="late"),
        ):
            with pytest.raises(ConflictError):
                change()

    def test_an_abandoned_run_may_be_tried_again(self, store: Store, new_measurement: NewMeasurementFactory) -> None:
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
        self, store: Store, new_measurement: NewMeasurementFactory
    ) -> None:
        lease = claimed(store)
        run = intended(store, lease)
        with pytest.raises(InputError):
            store.finish_run(lease=lease, run_id=run.id, measurement=new_measurement(step_s=float("nan")), gpu_seconds=1.0)
        assert store.runs(search_id=lease.search_id) == [run]
        assert store.measurements().items == ()

    def test_figures_are_those_of_the_runs(self, store: Store, new_measurement: NewMeasurementFactory) -> None:
        lease = claimed(store)
        predicted = {"step_s": 1.0, "calibrated_step_s": 1.25, "calibrated_step_s_interval": [1.0, 1.5],
                     "memory_allocated_bytes": 2.0**40, "chosen_by": "best_expected"}  # fmt: skip
        reduced = Fidelity(num_hidden_layers=2)
        ids = [
            store.intend_run(lease=lease, parallel=ParallelConfig(data_parallel_size=n), fidelity=f, predicted=p).id
            for n, f, p in ((1, Fidelity(), predicted), (2, reduced, {}), (4, Fidelity(), {}))
        ]
        implied = Measurement(status="ok", step_s=0.5, fidelity=reduced, extrapolated_step_s=2.0)
        store.finish_run(lease=lease, run_id=ids[0], measurement=new_measurement(), gpu_seconds=3.0)
        store.finish_run(
            lease=lease, run_id=ids[1], measurement=replace(new_measurement(), measurement=implied), gpu_seconds=1.0
        )
        store.abandon_run(lease=lease, run_id=ids[2], cause="node lost")
        runs, figures = store.runs(search_id=lease.search_id), store.run_figures(search_id=lease.search_id)
        for run, told in zip(runs, figures, strict=True):
            measured = run.measurement
            assert (told.id, told.number, told.state, told.parallel) == (run.id, run.number, run.state, run.parallel)
            assert (told.status, told.known_step_s) == ((measured.status, measured.known_step_s) if measured else (None, None))
            assert told.peak_memory_bytes == (measured.peak_memory_bytes if measured else None)
        first, _, last = figures
        assert (first.predicted_step_s, first.expected_step_s, first.expected_step_s_interval) == (1.0, 1.25, (1.0, 1.5))
        assert (first.predicted_memory_bytes, first.chosen_by, first.gpu_seconds) == (2.0**40, "best_expected", 3.0)
        assert (last.cause, last.predicted_step_s, last.expected_step_s_interval) == ("node lost", None, None)
        assert store.get_run(search_id=lease.search_id, run_id=ids[1]) == runs[1]
        with pytest.raises(NotFoundError):
            store.get_run(search_id=claimed(store).search_id, run_id=ids[1])
        with pytest.raises(NotFoundError):
            store.run_figures(search_id="0" * 16)

    def test_a_lease_reaches_only_its_own_runs(self, store: Store) -> None:
        run = intended(store, claimed(store))
        with pytest.raises(NotFoundError):
            store.mark_submitted(lease=claimed(store), run_id=run.id, handle="h")


class TestMeasurements:
    def test_filters_and_pages(self, store: Store, new_measurement: NewMeasurementFactory) -> None:
        for number in range(5):
            store.add_measurement(measurement=new_measurement(step_s=number + 1.0, source="reported"))
        store.add_measurement(measurement=new_measurement(gpu="h100-sxm-80gb", problem_digest="p"))
        store.add_measurement(measurement=new_measurement(status="oom", step_s=None))
        first = store.measurements(source="reported", limit=3)
        second = store.measurements(source="reported", limit=3, cursor=first.next_cursor)
        assert [m.measurement.step_s for m in first.items + second.items] == [5.0, 4.0, 3.0, 2.0, 1.0]
        assert second.next_cursor is None
        assert [m.measurement.status for m in store.measurements(status="oom").items] == ["oom"]
        (h100,) = store.measurements(problem_digest="p", digest=first.items[0].digest, gpu="h100-sxm-80gb").items
        assert h100.gpu == "h100-sxm-80gb"
        assert store.measurements(model="other").items == ()

    def test_an_idempotency_key_stores_one(self, store: Store, new_measurement: NewMeasurementFactory) -> None:
        first = store.add_measurement(measurement=new_measurement(), idempotency_key="k")
        assert store.add_measurement(measurement=new_measurement(), idempotency_key="k") == first
        with pytest.raises(ConflictError):
            store.add_measurement(measurement=new_measurement(step_s=2.0), idempotency_key="k")
        assert len(store.measurements().items) == 1

    @pytest.mark.parametrize("trust", [-0.1, 1.1, float("nan")])
    def test_trust_is_a_share(self, store: Store, new_measurement: NewMeasurementFactory, trust: float) -> None:
        with pytest.raises(InputError):
            store.add_measurement(measurement=new_measurement(trust=trust))

    def test_an_unknown_measurement_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFoundError):
            store.get_measurement(measurement_id="nope")


class TestKnowledge:
    def test_calibrations_are_versions(self, store: Store) -> None:
        series = {"cluster_key": "cpu x2", "framework": "megatron-core"}
        assert store.latest_calibration(**series) is None
        first = store.save_calibration(**series, payload={"matmul": 0.5}, num_measurements=4)
        other = store.save_calibration(**series, model_family="llama", payload={}, num_measurements=1)
        second = store.save_calibration(**series, payload={"matmul": 0.6}, num_measurements=5)
        assert (first.version, second.version, other.version) == (1, 2, 1)
        assert store.latest_calibration(**series) == second
        assert store.latest_calibration(**series, model_family="llama") == other
        assert store.list_calibrations(cluster_key="cpu x2").items == (second, other, first)
        assert store.list_calibrations(framework="nanotron").items == ()

    def test_measured_clusters_are_those_that_measurements_speak_of(
        self, store: Store, new_measurement: Callable[..., NewMeasurement]
    ) -> None:
        assert store.measured_clusters() == []
        for key, framework in (("a", "megatron-core"), ("a", "megatron-core"), ("a", "nanotron"), ("b", "nanotron")):
            store.add_measurement(measurement=new_measurement(cluster_key=key, framework=framework))
        found = [(each.cluster_key, each.framework, each.measurements) for each in store.measured_clusters()]
        assert found == [("a", "megatron-core", 2), ("a", "nanotron", 1), ("b", "nanotron", 1)]
        assert [each.cluster_key for each in store.measured_clusters(framework="nanotron")] == ["a", "b"]
        assert store.measured_clusters(gpu="l40s-48gb") == []

    def test_a_registration_is_replaced_by_name_and_keeps_its_age(self, store: Store) -> None:
        first = store.put_registration(kind="cluster", name="lab", spec={"gpu": "cpu"}, owner="ada")
        second = store.put_registration(kind="cluster", name="lab", spec={"gpu": "l40s-48gb"}, owner="ada")
        assert (second.spec, second.created_at) == ({"gpu": "l40s-48gb"}, first.created_at)
        assert store.get_registration(kind="cluster", name="lab", owner="ada") == second
        assert store.get_registration(kind="model", name="lab", owner="ada") is None

    def test_a_name_means_ones_own_before_everybodys_and_never_anothers(self, store: Store) -> None:
        adas = store.put_registration(kind="cluster", name="lab", spec={"gpu": "cpu"}, owner="ada")
        assert store.get_registration(kind="cluster", name="lab", owner="bob") is None
        everybodys = store.put_registration(kind="cluster", name="lab", spec={"gpu": "l40s-48gb"})
        attic = store.put_registration(kind="cluster", name="attic", spec={})
        assert store.list_registrations(kind="cluster", owner="ada") == [attic, adas]
        assert store.list_registrations(kind="cluster", owner="bob") == [attic, everybodys]
        assert store.list_registrations(kind="cluster") == [attic, everybodys]
        store.remove_registration(kind="cluster", name="lab", owner="ada")
        assert store.get_registration(kind="cluster", name="lab", owner="ada") == everybodys
        with pytest.raises(NotFoundError):
            store.remove_registration(kind="cluster", name="lab", owner="ada")
