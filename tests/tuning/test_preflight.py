"""The check of the nodes before a search's first run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement, OperationTimes
from hp_tool.domain.requests import BenchmarkRequest
from hp_tool.domain.states import JobState, SearchState
from hp_tool.loop.tuning import preflight, run_search
from hp_tool.questions import schema
from hp_tool.store import open_store
from tests.tuning.cpu_engine import CpuEngine

HOSTS = ("n1", "n2", "n3", "n4")
QUERY = {
    "kind": "training",
    "model": {
        "name": "gpt",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
    "cluster": {"gpu": "cpu", "num_gpus": 4, "gpus_per_node": 1},
    "training": {"sequence_length": 64, "global_batch_size": 16, "precision": "fp32"},
    "search": {"budget_runs": 2, "fidelity": "full", "preflight": True},
}


@dataclass
class FourNodes(CpuEngine):
    """One of which takes twice as long as the others."""

    plans: list[LaunchPlan] = field(default_factory=list)

    def submit(self, plan: LaunchPlan) -> str:
        self.plans.append(plan)
        return super().submit(plan)

    def fetch(self, handle: str) -> Measurement:
        request = self.requests[handle]
        if not isinstance(request, BenchmarkRequest):
            return super().fetch(handle)
        times = tuple(
            OperationTimes(operation=each, seconds_per_rank=(1.0, 1.0, 2.0, 1.0))
            for each in request.operations
        )
        hardware = Hardware(gpu="cpu", num_gpus=4, hosts=HOSTS)
        return Measurement(status="ok", operations=times, hardware=hardware, wall_s=30.0)


def test_a_worker_that_goes_on_charges_the_check_to_its_first_run(tmp_path: Path) -> None:
    """Four devices for 30 seconds are 120 GPU-seconds, charged once."""
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    try:
        asked = store.create_search(query=schema.to_dict(schema.parse_query(QUERY)))
        _, lease = store.claim_search(holder="one", lease_s=60.0) or (None, None)
        assert lease is not None
        run_search(store=store, lease=lease, launcher=FourNodes())
        first, second = (run.gpu_seconds or 0.0 for run in store.runs(search_id=asked.id))
    finally:
        store.close()
    assert first > 120.0 > second > 0.0


def test_a_node_that_lags_is_avoided_and_the_check_is_charged_once(tmp_path: Path) -> None:
    engine, told = FourNodes(), []
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    try:
        asked = store.create_search(query=schema.to_dict(schema.parse_query(QUERY)))
        _, lease = store.claim_search(holder="one", lease_s=60.0) or (None, None)
        assert lease is not None
        releasing = iter([False, True])  # the first worker has to go when the check has ended
        assert (
            run_search(
                store=store,
                lease=lease,
                launcher=engine,
                on_event=lambda kind, payload: told.append((kind, payload)),
                should_release=lambda: next(releasing, True) and bool(told),
            )
            is None
        )
        _, lease = store.claim_search(holder="two", lease_s=60.0) or (None, None)
        assert lease is not None
        run_search(store=store, lease=lease, launcher=engine)
        record, runs = store.get_search(search_id=asked.id), store.runs(search_id=asked.id)
    finally:
        store.close()
    check, *others = engine.plans
    assert check.job_name == f"{asked.id}.preflight" and check.excluded_hosts == ()
    assert len(others) == 2 and all(plan.excluded_hosts == ("n3",) for plan in others)
    (payload,) = (payload for kind, payload in told if kind == "preflight")
    assert (payload["avoided"], payload["gpu_seconds"]) == (["n3"], 120.0)
    assert {(each["kind"], each["name"]) for each in payload["slow"]} == {("node", "n3")}
    first, second = runs
    assert (
        first.measurement is not None
        and second.measurement is not None
        and record.state is SearchState.SUCCEEDED
    )
    assert first.gpu_seconds is not None and first.gpu_seconds > 120.0 > (second.gpu_seconds or 0.0)


class SlowCheck(FourNodes):
    """Whose check of the nodes takes ten seconds of a clock that only sleeping moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.polled_at = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        known = super().poll(handles)
        if not any(handle.endswith(".preflight") for handle in known):
            return known
        self.polled_at.append(self.now_s)
        assert len(self.polled_at) < 100, "asked without a pause"
        return known if self.now_s >= 10.0 else dict.fromkeys(known, JobState.RUNNING)


def test_a_check_that_takes_a_while_is_asked_after_twice_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlowCheck()
    clock = SimpleNamespace(monotonic=lambda: engine.now_s, sleep=engine.sleep)
    monkeypatch.setattr(preflight, "time", clock)
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    try:
        store.create_search(query=schema.to_dict(schema.parse_query(QUERY)))
        _, lease = store.claim_search(holder="one", lease_s=60.0) or (None, None)
        assert lease is not None
        run_search(store=store, lease=lease, launcher=engine)
    finally:
        store.close()
    assert engine.polled_at == [0.5 * n for n in range(21)]
    assert [plan.excluded_hosts for plan in engine.plans] == [(), ("n3",), ("n3",)]
