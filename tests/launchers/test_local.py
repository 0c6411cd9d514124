"""The local launcher: the contract, and what only it promises."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hp_tool.cluster.launchers import create, local, supervisor
from hp_tool.cluster.launchers.readback import read_json
from hp_tool.domain.measurement import KILLED_CAUSE, ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Launcher
from hp_tool.domain.states import JobState
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, LauncherError
from tests.launchers.contract import GOOD, LauncherContract, plan, processes, started, wait


class TestLocalLauncher(LauncherContract):
    @pytest.fixture
    def new_launcher(self, tmp_path: Path) -> Callable[[], Launcher]:
        return lambda: create("local", root=tmp_path, cpu_only=True)

    def test_a_killed_supervisor_loses_the_job_and_leaves_no_orphan(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        handle = started(launcher)
        record = read_json(tmp_path / "job-1" / "started.json")
        assert record is not None
        psutil.Process(record["pid"]).kill()
        assert wait(launcher, handle, until={JobState.LOST}) is JobState.LOST
        psutil.wait_procs(processes("job-1"), timeout=10)
        assert processes("job-1") == []
        assert launcher.fetch(handle).status == "preempted"

    def test_a_job_that_is_killed_from_outside_says_nothing_of_its_configuration(
        self, launcher: Launcher
    ) -> None:
        handle = started(launcher)
        next(each for each in processes("job-1") if "job.py" in each.cmdline()).kill()
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        assert (launcher.fetch(handle).status, launcher.fetch(handle).cause) == (
            "preempted",
            KILLED_CAUSE,
        )

    def test_a_terminated_supervisor_ends_the_job_as_preempted(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        handle = started(launcher)
        record = read_json(tmp_path / "job-1" / "started.json")
        assert record is not None
        psutil.Process(record["pid"]).terminate()
        assert (
            wait(launcher, handle, until={JobState.PREEMPTED, JobState.LOST}) is JobState.PREEMPTED
        )
        assert processes("job-1") == []

    def test_jobs_share_no_devices(self, launcher: Launcher) -> None:
        first = started(launcher)
        second = launcher.submit(plan(GOOD, job_name="job-2"))
        assert launcher.poll([first, second]) == {first: JobState.RUNNING, second: JobState.QUEUED}
        with pytest.raises(LauncherError, match="still queued"):
            launcher.fetch(second)
        launcher.cancel("job-1")
        assert wait(launcher, second, until={JobState.FINISHED}) is JobState.FINISHED

    def test_a_queued_job_can_be_cancelled(self, launcher: Launcher) -> None:
        started(launcher)
        second = launcher.submit(plan(GOOD, job_name="job-2"))
        launcher.cancel("job-2")
        assert launcher.poll([second]) == {second: JobState.CANCELLED}
        launcher.cancel("job-1")

    def test_a_submit_that_died_half_way_is_taken_up_again(
        self, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(launcher), "_start", lambda *_, **__: None)
            launcher.submit(plan(GOOD))
        assert launcher.find("job-1") is None
        handle = launcher.submit(plan(GOOD))
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED

    def test_of_many_callers_in_one_instant_one_starts_the_job(
        self, new_launcher: Callable[[], Launcher], tmp_path: Path
    ) -> None:
        callers = [
            threading.Thread(target=lambda: new_launcher().submit(plan(GOOD))) for _ in range(6)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        wait(new_launcher(), "job-1", until={JobState.FINISHED})
        assert (tmp_path / "job-1" / "runs.txt").read_text() == "x"
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("~")] == [
            "~devices"
        ]


def _request(**changes: object) -> ProfileRequest:
    values: dict[str, object] = {
        "run_id": "run-1",
        "model": ModelSpec(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256
        ),
        "training": TrainingWorkload(sequence_length=32, global_batch_size=4),
        "parallel": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
        "num_gpus": 2,
        "gpu": "cpu",
        "steps": 2,
        "warmup_steps": 1,
        "timeout_s": 300.0,
    }
    return ProfileRequest(**{**values, **changes})  # type: ignore[arg-type]


def test_the_plan_is_torchrun_on_the_loopback_device(tmp_path: Path) -> None:
    launcher = create("local", root=tmp_path, cpu_only=True)
    planned = launcher.plan(_request(), job_name="search-1.run-1.token-3")
    assert planned == launcher.plan(_request(), job_name="search-1.run-1.token-3")
    assert planned.command[1:] == (
        *("rendezvous.py", "--nnodes=1", "--nproc-per-node=2"),
        *("-m", "hp_tool.cluster.profiler", "request.json", "result.json"),
    )
    assert planned.environment["OMP_NUM_THREADS"] == "1"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"gpu": "h100-sxm-80gb"}, {"num_gpus": 100_000}])
def test_a_request_for_other_hardware_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="This host has") as refused:
        create("local", root=tmp_path, cpu_only=True).plan(_request(**wrong), job_name="job")
    assert refused.value.code == "launcher_mismatch"


def test_an_unknown_launcher_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="known: endpoint, kubernetes, local"):
        create("lsf")


def _ends_with(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Have every supervisor end with this code, and start nothing."""
    done = subprocess.CompletedProcess[bytes](args=(), returncode=code)
    monkeypatch.setattr(local.subprocess, "run", lambda *_, **__: done)


def test_a_supervisor_that_fails_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ends_with(monkeypatch, 1)
    monkeypatch.setattr(local.time, "sleep", lambda _: pytest.fail("waited for nobody"))
    with pytest.raises(LauncherError, match=r"job-1 did not start.*supervisor\.log"):
        create("local", root=tmp_path, cpu_only=True).submit(plan(GOOD))


def test_who_loses_the_race_to_start_a_job_waits_until_the_winner_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ends_with(monkeypatch, supervisor.EXIT_ALREADY_RUN)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (tmp_path / "job-1" / "started.json").touch()

    monkeypatch.setattr(local.time, "sleep", sleep)
    assert create("local", root=tmp_path, cpu_only=True).submit(plan(GOOD)) == "job-1"
    assert len(waits) == 3


def test_a_job_that_the_winner_never_starts_is_told_after_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ends_with(monkeypatch, supervisor.EXIT_ALREADY_RUN)
    monkeypatch.setattr(local, "_START_TIMEOUT_S", 0.1)
    with pytest.raises(LauncherError, match="job-1 did not start"):
        create("local", root=tmp_path, cpu_only=True).submit(plan(GOOD))
