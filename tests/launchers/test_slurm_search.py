"""Whole searches over a real Slurm: two-node torchrun jobs with real Megatron Core steps, through
every kind of restart.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import yaml

from hp_tool.domain.records import RunRecord
from hp_tool.domain.states import JobState, RunState, SearchState
from hp_tool.questions import schema
from hp_tool.store import SqlStore, open_store
from tests.conftest import skip_or_fail
from tests.launchers.contract import wait
from tests.launchers.slurm_cluster import SlurmCluster, until
from tests.profiler.requests import request
from tests.service.processes import process as hp_tool_process

pytestmark = pytest.mark.components

EXAMPLES = Path(__file__).parents[2] / "examples"
TUNE = (sys.executable, "-c", "from hp_tool.cli.main import main; main()", "tune", "--json")


@pytest.fixture(autouse=True)
def _megatron() -> None:
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )


class Search:
    """`hp-tool tune` in a process of its own, over the example's cluster."""

    def __init__(self, slurm: SlurmCluster, root: Path) -> None:
        self.slurm, self.runs_folder = slurm, root / "runs"
        self.url = f"sqlite:///{root / 'hp.sqlite3'}"
        self.environment = {
            **slurm.environment(),
            "HP_DATABASE_URL": self.url,
            "HP_RUNS_DIR": str(self.runs_folder),
            "HP_SLURM_CONFIG": str(EXAMPLES / "slurm-cluster.yaml"),
            "PYTHONPATH": str(EXAMPLES.parent),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*TUNE, *arguments], env=self.environment, stdout=pipe, stderr=pipe, text=True
        )

    def store(self) -> closing[SqlStore]:
        return closing(open_store(self.url))

    def id(self) -> str:
        with self.store() as store:
            return store.list_searches().items[0].id

    def runs(self) -> list[RunRecord]:
        with self.store() as store:
            return store.runs(search_id=store.list_searches().items[0].id)

    def jobs(self) -> list[str]:
        """The folders of all jobs that this search ever had in the queue, one entry a job."""
        folders = self.slurm.run("squeue", "--noheader", "--states=all", "--format=%Z").splitlines()
        return sorted(
            Path(folder).name for folder in folders if folder.startswith(str(self.runs_folder))
        )


@pytest.fixture
def search(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Search]:
    return Search(slurm, tmp_path)


@pytest.fixture
def environment(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search's environment as this process's own, for workers to inherit."""
    for name, value in search.environment.items():
        monkeypatch.setenv(name, value)


def test_a_profile_run_over_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    launcher = slurm.launcher(root=tmp_path, gpus_per_node=1)
    asked = request(parallel={"tensor_parallel_size": 2, "sequence_parallel": True})
    handle = launcher.submit(launcher.plan(asked, job_name="two-nodes"))
    assert wait(launcher, handle, until={JobState.FINISHED, JobState.LOST}) is JobState.FINISHED
    measurement = launcher.fetch(handle)
    assert measurement.status == "ok", measurement.log_tail
    assert len(measurement.step_times_s) == 2
    assert measurement.losses[-1] < measurement.losses[0]
    nodes = slurm.run("scontrol", "show", "job", slurm.job_id(tmp_path / "two-nodes"))
    assert "NumNodes=2" in nodes and "NodeList=n[1-2]" in nodes


@pytest.mark.long
def test_a_run_that_its_time_limit_ends_keeps_its_steps(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    launcher = slurm.launcher(root=tmp_path)
    asked = request(
        parallel={"tensor_parallel_size": 2}, steps=10_000_000, warmup_steps=1, timeout_s=45.0
    )
    handle = launcher.submit(launcher.plan(asked, job_name="endless"))
    assert wait(launcher, handle, until={JobState.FINISHED, JobState.LOST}) is JobState.FINISHED
    measurement = launcher.fetch(handle)
    assert measurement.status == "ok", measurement.log_tail
    assert (
        measurement.cause == f"{len(measurement.step_times_s)} steps measured: hit the 45 s limit"
    )
    assert measurement.step_s is not None and measurement.step_s < 5.0
    assert (
        measurement.hardware is not None
        and measurement.hardware.hosts
        and measurement.versions["megatron-core"]
    )
    assert measurement.differences["bias_dropout_fusion"] == ("cuda",)


@pytest.mark.long
def test_a_search_outlives_a_restart_of_the_controller(search: Search) -> None:
    process = search.start(str(EXAMPLES / "slurm.yaml"), "--budget-runs", "3")
    until(lambda: len(search.jobs()) == 2)
    search.slurm.stop_controller()
    search.slurm.start_controller()
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    result = json.loads(stdout)
    assert result["search"]["profile_runs"] == 3
    assert result["recommendations"][0]["measurement"]["status"] == "ok"
    assert search.jobs() == sorted(
        run.job_name for run in search.runs()
    )  # nothing lost, nothing doubled


@pytest.mark.long
def test_a_search_whose_process_is_killed_adopts_its_running_job(search: Search) -> None:
    process = search.start(str(EXAMPLES / "slurm.yaml"), "--budget-runs", "2")
    until(lambda: any("RUNNING" in job for job in search.slurm.open_jobs()))
    process.kill()
    process.communicate(timeout=30)
    (running,) = search.jobs()
    resumed = search.start("--resume", search.id())
    stdout, stderr = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, stderr
    runs = search.runs()
    assert [run.state for run in runs] == [RunState.FINISHED, RunState.FINISHED]
    assert (
        runs[0].job_name == running
        and runs[0].measurement is not None
        and runs[0].measurement.status == "ok"
    )
    assert search.jobs() == sorted(run.job_name for run in runs)
    assert json.loads(stdout)["search"]["profile_runs"] == 2


def test_a_search_that_is_cancelled_leaves_no_job_behind(search: Search) -> None:
    process = search.start(str(EXAMPLES / "slurm.yaml"), "--budget-runs", "3")
    until(lambda: any("RUNNING" in job for job in search.slurm.open_jobs()))
    with search.store() as store:
        store.request_cancel(search_id=search.id())
        process.communicate(timeout=60)
        assert store.get_search(search_id=search.id()).state is SearchState.CANCELLED
    until(lambda: search.slurm.open_jobs() == [])
    assert [run.state for run in search.runs()] == [RunState.ABANDONED]
    assert search.jobs() == [run.job_name for run in search.runs()]


@pytest.mark.long
def test_a_restarted_worker_adopts_the_jobs_of_a_killed_one(
    search: Search, tmp_path: Path, environment: None
) -> None:
    query = yaml.safe_load((EXAMPLES / "slurm.yaml").read_text())
    query["search"] |= {"budget_runs": 1, "steps": 4}
    with search.store() as store:
        asked = store.create_search(query=schema.to_dict(schema.parse_query(query)))
        worker = partial(
            hp_tool_process, "worker", "--lease-s", "2", database_url=search.url, home=tmp_path
        )
        with worker() as first:
            until(lambda: any("RUNNING" in job for job in search.slurm.open_jobs()))
            first.kill()
            first.wait()
        adopted = search.jobs()
        with worker():
            until(
                lambda: store.get_search(search_id=asked.id).state is SearchState.SUCCEEDED,
                limit_s=120,
            )
    (run,) = search.runs()
    assert run.measurement is not None and run.measurement.status == "ok" and run.attempt == 0
    assert search.jobs() == adopted == [run.job_name]


def test_a_partition_that_does_not_exist_ends_the_search_at_the_first_answer(
    search: Search, tmp_path: Path
) -> None:
    options = yaml.safe_load((EXAMPLES / "slurm-cluster.yaml").read_text()) | {
        "partition": "nowhere"
    }
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(options))
    search.environment["HP_SLURM_CONFIG"] = str(tmp_path / "wrong.yaml")
    process = search.start(str(EXAMPLES / "slurm.yaml"), "--budget-runs", "8")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1 and "invalid partition" in stderr, stderr
    (run,) = search.runs()
    assert (run.state, run.gpu_seconds, search.jobs()) == (RunState.ABANDONED, 0.0, [])
    with search.store() as store:
        record = store.get_search(search_id=search.id())
        assert (
            record.state is SearchState.FAILED
            and record.error is not None
            and record.error["code"] == "refused"
        )


@pytest.mark.long
def test_a_held_job_is_shown_is_not_charged_and_ends_the_search_when_its_time_is_up(
    search: Search,
) -> None:
    search.slurm.run("scontrol", "update", "PartitionName=batch", "State=DOWN")
    try:
        process = search.start(str(EXAMPLES / "slurm.yaml"), "--set", "search.queue_timeout_s=8")

        def pending() -> object:
            with search.store() as store:
                if not store.list_searches().items:
                    return None
                return (
                    store.get_search(search_id=search.id())
                    .progress.get("pending", {})
                    .get("reason")
                )

        until(pending)
        assert pending() in ("PartitionDown", "None", "Priority")
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 1 and "queue_timeout_s of 8 s" in stderr, stderr
        (run,) = search.runs()
        assert (run.state, run.gpu_seconds) == (RunState.ABANDONED, 0.0)
        assert (
            run.account is not None
            and run.account["queue_s"] > 5.0
            and run.account["wall_s"] == 0.0
        )
        until(lambda: search.slurm.open_jobs() == [])
    finally:
        search.slurm.run("scontrol", "update", "PartitionName=batch", "State=UP")
