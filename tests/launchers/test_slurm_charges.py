"""Whole searches on a real Slurm whose first job comes to harm: the word for it, what is charged,
and what is learnt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hp_tool.domain.records import RunRecord
from hp_tool.domain.states import RunState
from hp_tool.loop.learning.make import calibrate
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from hp_tool.store import SqlStore, open_store
from tests.launchers.slurm_cluster import QUERY, SlurmCluster, until

pytestmark = pytest.mark.components

GPUS, HELD_S = 2, 1.5
TRAINER = """
import json, pathlib, time
mark = pathlib.Path({mark!r})
first, _ = not mark.exists(), mark.touch()
for step in range(1, 6):
    if first and step == {harmed_at}:
        print("began", flush=True)
        {harm}
        time.sleep(300)
    print(json.dumps({{"step": step, "step_s": 0.5}}), flush=True)
"""
FILL_MEMORY = "kept = bytearray(500 * 2**20); kept[::4096] = b'x' * 128000"


class Site:
    """A search in a thread, over a trainer that stands still in its first job; the test's thread is
    the administrator.
    """

    def __init__(self, slurm: SlurmCluster, root: Path, store: SqlStore) -> None:
        self.slurm, self.root, self.store = slurm, root, store

    def tuned(
        self,
        act: Callable[[str], object] = lambda job_id: None,
        *,
        harmed_at: int = 1,
        harm: str = "",
        gpu: str = "cpu",
        search: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[RunRecord]:
        """The search's runs; `act` is called with the first job once that has held its devices for
        HELD_S. Whatever happened to it, what ran is charged, and a single good measurement is all
        that the cluster's calibration learnt from.
        """
        script = self.root / "train.py"
        script.write_text(
            TRAINER.format(mark=str(self.root / "mark"), harmed_at=harmed_at, harm=harm)
        )
        changes = {
            "cluster": {"gpu": gpu, "num_gpus": GPUS, "gpus_per_node": GPUS},
            "search": {**QUERY["search"], "run_timeout_s": 60, **(search or {})},
            "trainer": {
                "command": [sys.executable, str(script), "{flags:megatron-lm}"],
                "reader": "json",
                "launch": "command",
            },
        }
        launcher = self.slurm.launcher(root=self.root / "runs", gpu=gpu, **options)
        with ThreadPoolExecutor(1) as pool:
            query = schema.parse_query({**QUERY, **changes})
            ended = pool.submit(tune, query=query, store=self.store, launcher=launcher)
            until(lambda: ended.done() or self.began())
            if not self.began():
                ended.result()  # says why
            claim = self.began()[0].with_name("claim")
            began_at = claim.stat().st_mtime
            until(lambda: time.time() - began_at > HELD_S)
            act(claim.read_text().strip())
            result = ended.result(timeout=120)
        runs = self.store.runs(search_id=result.search.id)
        harmed, last = runs[0], runs[-1]
        assert harmed.account is not None and harmed.finished_at is not None
        lived_s = harmed.finished_at.timestamp() - began_at
        assert (
            HELD_S - 1.0 <= harmed.account["wall_s"] <= lived_s + 1.0
        )  # Slurm counts whole seconds
        assert harmed.gpu_seconds == pytest.approx(GPUS * harmed.account["wall_s"])
        assert last.measurement is not None and (
            last.measurement.status,
            last.measurement.step_s,
        ) == ("ok", 0.5)
        assert any(row.measurement == last.measurement for row in result.recommendations)
        (learnt,) = calibrate(store=self.store)
        assert learnt.accuracy.measurements == 1
        return runs

    def began(self) -> list[Path]:
        """The log of the first job, once its command stands still."""
        return [log for log in (self.root / "runs").glob("*/job.log") if "began" in log.read_text()]

    def first_run_ended(self) -> bool:
        (search,) = self.store.list_searches().items
        return self.store.runs(search_id=search.id)[0].state.ended


@pytest.fixture
def site(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Site]:
    with closing(open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")) as store:
        yield Site(slurm, tmp_path, store)


def assert_tried_again(runs: list[RunRecord], *, cause: str) -> None:
    """The engine took the first job from us: no run of the budget, no measurement, and another
    attempt.
    """
    first, second = runs
    assert (first.state, first.cause, first.measurement) == (RunState.ABANDONED, cause, None)
    assert (second.parallel, second.attempt, second.state) == (first.parallel, 1, RunState.FINISHED)
    assert first.account is not None and len(first.account["hosts"]) == 1


def test_a_job_that_the_administrator_cancels_is_charged_and_tried_again(site: Site) -> None:
    runs = site.tuned(lambda job_id: site.slurm.run("scancel", job_id))
    assert_tried_again(runs, cause="Slurm ended the job: CANCELLED")
    assert "suspects" not in (runs[0].account or {})


def test_a_job_that_is_preempted_is_charged_and_tried_again(site: Site) -> None:
    def preempt(job_id: str) -> None:
        with site.slurm.urgent_job():
            until(site.first_run_ended)

    runs = site.tuned(preempt)
    assert_tried_again(runs, cause="Slurm ended the job: PREEMPTED")
    assert "suspects" not in (runs[0].account or {})  # nodes that are wanted elsewhere are sound


@pytest.mark.long
def test_a_job_whose_node_dies_is_charged_and_tried_again_elsewhere(site: Site) -> None:
    died: list[str] = []

    def power_cut(job_id: str) -> None:
        died.append(
            site.slurm.run("squeue", "--noheader", f"--jobs={job_id}", "--format=%N").strip()
        )
        site.slurm.kill_node(died[0])

    try:
        runs = site.tuned(power_cut)
    finally:
        site.slurm.start_nodes(died[0])
    assert_tried_again(runs, cause="Slurm ended the job: NODE_FAIL")
    assert (runs[0].account or {})["suspects"] == died
    assert runs[1].measurement is not None and runs[1].measurement.hardware is not None
    assert runs[1].measurement.hardware.hosts != tuple(died)


def test_a_job_that_its_time_limit_ends_is_measured_by_the_steps_that_it_kept(site: Site) -> None:
    (run,) = site.tuned(harmed_at=5, search={"run_timeout_s": 2.5})
    assert run.measurement is not None and run.measurement.step_times_s == (0.5, 0.5)
    assert run.measurement.cause == "2 of 3 steps measured: hit the 2.5 s limit"


def test_host_memory_that_runs_out_says_nothing_of_the_gpus(site: Site) -> None:
    memory: dict[str, Any] = {"exclusive": False, "sbatch_arguments": ["--mem=200M"]}
    first, second = site.tuned(
        harm=FILL_MEMORY, gpu="h100-sxm-80gb", search={"budget_runs": 2}, **memory
    )
    assert first.measurement is not None and first.state is RunState.FINISHED
    cause = "the kernel killed a process: out of host memory. Give jobs more host memory."
    assert (first.measurement.status, first.measurement.cause) == ("crashed", cause)
    assert first.parallel != second.parallel and second.attempt == 0
