"""The Slurm launcher on a real Slurm: the contract, and what only it promises."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hp_tool.domain.ports import Launcher
from hp_tool.domain.states import JobState
from hp_tool.domain.steps import format_step
from hp_tool.errors import LauncherError, RefusedError
from tests.launchers.contract import (
    GOOD,
    EngineContract,
    FurtherContract,
    Launching,
    ResultContract,
    await_the_end,
    plan,
    processes,
    started,
    wait,
)
from tests.launchers.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.components

BRIEF = "import time; time.sleep(2)\n" + GOOD


class OnSlurm(Launching):
    @pytest.fixture
    def new_launcher(self, slurm: SlurmCluster, tmp_path: Path) -> Callable[[], Launcher]:
        return lambda: slurm.launcher(root=tmp_path)


@pytest.mark.long
class TestSlurmFurther(OnSlurm, FurtherContract, ResultContract):
    pass


class TestSlurmLauncher(OnSlurm, EngineContract):
    def test_of_many_callers_in_one_instant_one_submits(
        self, new_launcher: Callable[[], Launcher], slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        callers = [
            threading.Thread(target=lambda: new_launcher().submit(plan(GOOD))) for _ in range(6)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        wait(new_launcher(), "job-1", until={JobState.FINISHED})
        assert (
            slurm.run("squeue", "--noheader", "--states=all", "--format=%Z")
            .splitlines()
            .count(str(tmp_path / "job-1"))
            == 1
        )

    def test_of_two_submissions_for_one_folder_one_runs(
        self, launcher: Launcher, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        handle = launcher.submit(plan(BRIEF))
        slurm.run("sbatch", f"--chdir={tmp_path / 'job-1'}", str(tmp_path / "job-1" / "job.sbatch"))
        until(lambda: slurm.open_jobs() == [])
        assert (tmp_path / "job-1" / "runs.txt").read_text() == "x"
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        assert launcher.fetch(handle).status == "ok"

    def test_a_queued_job_can_be_cancelled(self, launcher: Launcher, slurm: SlurmCluster) -> None:
        slurm.run("scontrol", "update", "PartitionName=batch", "State=DOWN")
        try:
            handle = launcher.submit(plan(GOOD))
            assert launcher.poll([handle]) == {handle: JobState.QUEUED}
            until(lambda: (launcher.poll([handle]), launcher.waiting(handle))[1])
            assert launcher.waiting(handle).reason in ("PartitionDown", "Priority", "None")
            launcher.cancel("job-1")
            assert wait(launcher, handle, until={JobState.CANCELLED}) is JobState.CANCELLED
            measurement = launcher.fetch(handle)
            assert (measurement.cause, measurement.wall_s) == ("cancelled on request", 0.0)
            assert launcher.waiting(handle) is None
        finally:
            slurm.run("scontrol", "update", "PartitionName=batch", "State=UP")

    def test_a_job_that_sees_the_mark_of_its_cancel_when_it_starts_is_cancelled(
        self, launcher: Launcher, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        """The order to end it is on its way while Slurm starts it."""
        slurm.run("scontrol", "update", "PartitionName=batch", "State=DOWN")
        try:
            handle = launcher.submit(plan(GOOD))
            (tmp_path / "job-1" / "cancel").touch()
        finally:
            slurm.run("scontrol", "update", "PartitionName=batch", "State=UP")
        assert (
            wait(launcher, handle, until={JobState.CANCELLED, JobState.FINISHED})
            is JobState.CANCELLED
        )
        assert launcher.fetch(handle).cause == "cancelled on request"
        assert not (tmp_path / "job-1" / "runs.txt").exists()

    def test_a_job_that_somebody_else_cancels_is_taken_from_us(
        self, launcher: Launcher, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        handle = started(launcher)
        slurm.run("scancel", slurm.job_id(tmp_path / "job-1"))
        assert (
            wait(launcher, handle, until={JobState.PREEMPTED, JobState.CANCELLED})
            is JobState.PREEMPTED
        )
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.cause) == (
            "preempted",
            "Slurm ended the job: CANCELLED",
        )
        assert measurement.wall_s is not None
        assert measurement.hardware is not None and set(measurement.hardware.hosts) <= {"n1", "n2"}

    def test_a_partition_that_does_not_exist_is_refused(
        self, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        with pytest.raises(RefusedError, match="invalid partition"):
            slurm.launcher(root=tmp_path, partition="nowhere").submit(plan(GOOD))
        with pytest.raises(LauncherError, match="invalid partition"):
            slurm.launcher(root=tmp_path, partition="nowhere").answers()
        assert (
            "a one-node job would be accepted: to start at"
            in slurm.launcher(root=tmp_path).answers()
        )

    def test_a_job_that_can_never_start_is_told_and_taken_back(
        self, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        launcher = slurm.launcher(root=tmp_path, time_s=7200.0)  # the partition gives an hour
        handle = launcher.submit(plan(GOOD))  # which sbatch takes, and lets wait for ever
        assert (
            wait(launcher, handle, until={JobState.FINISHED, JobState.PREEMPTED})
            is JobState.FINISHED
        )
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.cause) == (
            "crashed",
            "Slurm rejects the job: PartitionTimeLimit",
        )
        assert (measurement.refused, measurement.wall_s) == (True, 0.0)

    def test_a_job_by_way_of_a_login_node(
        self, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """ssh stands for itself: a shell of its own, which knows the cluster where this process
        does not.
        """
        (tmp_path / "bin").mkdir()
        ssh = tmp_path / "bin" / "ssh"
        configuration = slurm.environment()["SLURM_CONF"]
        ssh.write_text(
            f"#!/bin/bash\nshift 4\nexec env -i PATH=$PATH HOME=/root SLURM_CONF={configuration} "
            'bash -c "$*"\n'
        )
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_CONF", "/no/such/slurm.conf")
        launcher = slurm.launcher(root=tmp_path / "runs", ssh="me@login1", comment="hp {search}")
        assert "would be accepted" in launcher.answers()
        script = GOOD.replace('"ok"', '"ok", "versions": {"mark": os.environ["MARK_OF_TEST"]}')
        handle = launcher.submit(replace(plan(script), search="0123"))
        assert wait(launcher, handle, until={JobState.FINISHED, JobState.LOST}) is JobState.FINISHED
        assert launcher.fetch(handle).versions == {"mark": "job-1"}
        assert "Comment=hp 0123" in slurm.run(
            "scontrol", "show", "job", slurm.job_id(tmp_path / "runs" / "job-1")
        )
        other = launcher.submit(plan("import time; time.sleep(300)", job_name="job-2"))
        launcher.cancel("job-2")
        assert (
            wait(launcher, other, until={JobState.CANCELLED, JobState.LOST}) is JobState.CANCELLED
        )

    @pytest.mark.parametrize(("gpu", "status"), [("cpu", "oom"), ("h100-sxm-80gb", "crashed")])
    def test_host_memory_that_runs_out_is_not_the_gpus(
        self, slurm: SlurmCluster, tmp_path: Path, gpu: str, status: str
    ) -> None:
        launcher = slurm.launcher(
            root=tmp_path, gpu=gpu, exclusive=False, sbatch_arguments=["--mem=200M"]
        )
        script = (
            "import time\nprint('filling', flush=True)\nkept = bytearray(500 * "
            "2**20)\nkept[::4096] = b'x' * 128000\n"
        )
        handle = launcher.submit(plan(script + "time.sleep(300)"))
        assert (
            wait(launcher, handle, until={JobState.FINISHED, JobState.PREEMPTED})
            is JobState.FINISHED
        )
        measurement = launcher.fetch(handle)
        assert (measurement.status, "out of host memory" in (measurement.cause or "")) == (
            status,
            True,
        ), measurement
        assert measurement.wall_s is not None and measurement.wall_s < 60.0

    def test_a_set_up_that_fails_ends_the_job_with_its_words(
        self, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        launcher = slurm.launcher(root=tmp_path, setup=["source /no/such/environment"])
        handle = launcher.submit(plan(GOOD))
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        measurement = launcher.fetch(handle)
        assert measurement.status == "crashed"
        assert "before the job started" in (measurement.cause or "")
        assert "/no/such/environment: No such file" in (measurement.cause or "")

    def test_nothing_of_this_process_is_in_a_jobs_environment(
        self, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in (
            "LD_LIBRARY_PATH",
            "NCCL_DEBUG",
            "TORCH_LOGS",
            "VIRTUAL_ENV",
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "TRITON_HOME",
        ):
            monkeypatch.setenv(name, "/of/the/worker")
        script = GOOD.replace('"ok"', '"ok", "versions": dict(os.environ)')
        for inherit in ((), ("NCCL_DEBUG",)):
            launcher = slurm.launcher(root=tmp_path, inherit=list(inherit))
            handle = launcher.submit(plan(script, job_name=f"job-{len(inherit)}"))
            wait(launcher, handle, until={JobState.FINISHED})
            seen = launcher.fetch(handle).versions
            assert (
                tuple(name for name, value in seen.items() if value == "/of/the/worker") == inherit
            )

    def test_a_job_stays_away_from_nodes_that_failed(
        self, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        launcher = slurm.launcher(root=tmp_path)
        handle = launcher.submit(replace(plan(GOOD), excluded_hosts=("n1",)))
        wait(launcher, handle, until={JobState.FINISHED})
        assert "NodeList=n2" in slurm.run(
            "scontrol", "show", "job", slurm.job_id(tmp_path / "job-1")
        )

    def test_gpus_are_slurms_to_give(
        self, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")  # of this host; the job's are others
        launcher = slurm.launcher(root=tmp_path, gpu="h100-sxm-80gb", gpus_per_node=8)
        script = GOOD.replace(
            '"ok"', '"ok", "versions": {"devices": os.environ["CUDA_VISIBLE_DEVICES"]}'
        )
        handle = launcher.submit(replace(plan(script), num_gpus=3))
        wait(launcher, handle, until={JobState.FINISHED})
        assert launcher.fetch(handle).versions == {"devices": "0,1,2"}
        assert launcher.hardware().num_gpus == 16


class TestLogs:
    """Nodes that see the logs' folder alone; a job's own folder is on this host, under another name
    while the job runs.
    """

    @pytest.fixture
    def launcher(self, slurm: SlurmCluster, tmp_path: Path) -> Launcher:
        (tmp_path / "logs").mkdir()
        return slurm.launcher(
            root=tmp_path / "runs", gpus_per_node=1, logs={"folder": str(tmp_path / "logs")}
        )

    def test_a_job_over_two_nodes_that_never_see_its_folder(
        self, launcher: Launcher, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        script = (
            "import os; rank = os.environ['PET_NODE_RANK']; print('node', rank)\nif rank == "
            "'1': raise SystemExit\n"
        )
        slurm.run("scontrol", "update", "PartitionName=batch", "State=DOWN")
        try:
            handle = launcher.submit(
                replace(plan(script + GOOD), num_gpus=2, returns=("runs.txt",))
            )
            (tmp_path / "runs").rename(tmp_path / "hidden")
        finally:
            slurm.run("scontrol", "update", "PartitionName=batch", "State=UP")
        until(lambda: slurm.open_jobs() == [])
        assert not (tmp_path / "runs").exists()
        (tmp_path / "hidden").rename(tmp_path / "runs")
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.step_s, measurement.losses) == (
            "ok",
            0.5,
            (2.0, 1.0),
        )
        assert launcher.output(handle, name="runs.txt") == "x"
        assert sorted(launcher.output(handle).split()) == ["0", "1", "node", "node"]

    def test_cancel_and_crash_and_time_limit_are_told_apart(self, launcher: Launcher) -> None:
        handle = started(launcher)
        until(lambda: "started" in launcher.output(handle))  # while it runs
        launcher.cancel("job-1")
        assert (
            wait(launcher, handle, until={JobState.CANCELLED, JobState.FINISHED})
            is JobState.CANCELLED
        )
        assert processes("job-1") == []
        assert launcher.fetch(handle).cause == "cancelled on request"
        crash = launcher.submit(plan("raise ValueError('the fabric is on fire')", job_name="job-2"))
        late = launcher.submit(
            plan(
                "import time; print('on', flush=True); time.sleep(300)",
                job_name="job-3",
                timeout_s=6.0,
            )
        )
        for each in (crash, late):
            assert (
                wait(launcher, each, until={JobState.FINISHED, JobState.PREEMPTED})
                is JobState.FINISHED
            )
        assert (
            launcher.fetch(crash).cause
            == "exit code 1 without a result: ValueError: the fabric is on fire"
        )
        measurement = launcher.fetch(late)
        assert (measurement.status, measurement.cause, measurement.log_tail) == (
            "timeout",
            "hit the 6 s limit",
            "on\n",
        )

    def test_an_interpreter_that_is_not_there_is_named(
        self, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        (tmp_path / "logs").mkdir()
        launcher = slurm.launcher(
            root=tmp_path / "runs",
            logs={"folder": str(tmp_path / "logs")},
            python="/no/such/python",
        )
        handle = launcher.submit(plan(GOOD))
        wait(launcher, handle, until={JobState.FINISHED})
        measurement = launcher.fetch(handle)
        assert (measurement.status, "before the job started" in (measurement.cause or "")) == (
            "crashed",
            True,
        )
        assert (
            "/no/such/python: No such file"
            in (tmp_path / "runs" / "job-1" / "slurm.log").read_text()
        )


class TestPreemption:
    def test_a_preempted_job_is_no_failure(self, slurm: SlurmCluster, tmp_path: Path) -> None:
        launcher = slurm.launcher(root=tmp_path)
        handle = started(launcher)
        with slurm.urgent_job():
            assert (
                wait(launcher, handle, until={JobState.PREEMPTED, JobState.FINISHED})
                is JobState.PREEMPTED
            )
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.cause) == (
            "preempted",
            "Slurm ended the job: PREEMPTED",
        )
        assert processes("job-1") == []
        assert measurement.wall_s is not None and measurement.wall_s < 60.0
        assert measurement.hardware is not None and set(measurement.hardware.hosts) <= {"n1", "n2"}
        assert measurement.suspects == ()  # nodes that are wanted elsewhere are sound

    def test_a_preempted_job_keeps_the_steps_it_measured(
        self, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        launcher = slurm.launcher(root=tmp_path)
        lines = [
            format_step(number, warmup=(1, 1), time_s=1.0, loss=2.0, norm=1.0)
            for number in (1, 2, 3)
        ]
        handle = launcher.submit(
            plan(
                "\n".join(f"print({line!r}, flush=True)" for line in lines)
                + "\nimport time; time.sleep(300)"
            )
        )
        until(lambda: "step 3" in (tmp_path / "job-1" / "job.log").read_text())
        with slurm.urgent_job():
            assert (
                wait(launcher, handle, until={JobState.PREEMPTED, JobState.FINISHED})
                is JobState.FINISHED
            )
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.step_times_s) == ("ok", (1.0, 1.0))
        assert measurement.cause == "2 steps measured: Slurm ended the job: PREEMPTED"

    def test_a_job_that_slurm_requeues_waits_and_runs_again(
        self, slurm: SlurmCluster, tmp_path: Path
    ) -> None:
        launcher = slurm.launcher(root=tmp_path, requeue=True)
        once = (
            'import os, time\nif "SLURM_RESTART_COUNT" not in os.environ: print("first", '
            "flush=True); time.sleep(300)\n"
        )
        handle = launcher.submit(plan(once + GOOD))
        folder = tmp_path / "job-1"
        until(lambda: (folder / "job.log").exists() and "first" in (folder / "job.log").read_text())
        job_id = slurm.job_id(folder)
        slurm.run("scontrol", "requeue", job_id)
        assert wait(launcher, handle, until={JobState.QUEUED, JobState.FINISHED}) is JobState.QUEUED
        # Slurm waits two minutes; it would refuse a start within the second of the end.
        slurm.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")
        assert (
            wait(launcher, handle, until={JobState.FINISHED, JobState.PREEMPTED})
            is JobState.FINISHED
        )
        assert launcher.fetch(handle).status == "ok"
        assert (folder / "runs.txt").read_text() == "x"


def test_a_job_that_took_its_marks_away_is_not_taken_for_one_that_was_never_submitted(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The last answer about the queue is older than the job."""
    launcher = slurm.launcher(root=tmp_path / "runs", poll_s=6.0)
    assert launcher.open_jobs() == []
    damage = "os.remove('claim'); os.remove('submitted.json'); os.remove('attempted')"
    told = tmp_path / "told"
    handle = launcher.submit(
        plan(f"import os, time\n{damage}\nopen({str(told)!r}, 'a').write('x')\ntime.sleep(300)")
    )
    until(told.exists)
    launcher.poll([handle])
    assert len(slurm.open_jobs()) == 1
    launcher.cancel("job-1")
    await_the_end("job-1")


class TestOutages:
    @pytest.fixture
    def whole(self, slurm: SlurmCluster) -> Iterator[SlurmCluster]:
        """The cluster, put together again afterwards."""
        yield slurm
        if (
            "UP"
            not in subprocess.run(
                ["scontrol", "ping"], capture_output=True, text=True, check=False
            ).stdout
        ):
            slurm.start_controller()

    def test_a_job_whose_node_dies_is_no_failure(self, whole: SlurmCluster, tmp_path: Path) -> None:
        launcher = whole.launcher(root=tmp_path, sbatch_arguments=["--nodelist=n2"])
        handle = started(launcher)
        try:
            whole.kill_node("n2")
            assert (
                wait(launcher, handle, until={JobState.PREEMPTED, JobState.FINISHED})
                is JobState.PREEMPTED
            )
        finally:
            whole.start_nodes("n2")
        await_the_end("job-1")
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.cause) == (
            "preempted",
            "Slurm ended the job: NODE_FAIL",
        )
        assert measurement.suspects == ("n2",)

    @pytest.mark.long
    def test_a_running_job_outlives_its_controller(
        self, whole: SlurmCluster, tmp_path: Path
    ) -> None:
        launcher = whole.launcher(root=tmp_path)
        handle = launcher.submit(
            plan("print('began', flush=True)\n" + BRIEF.replace("sleep(2)", "sleep(12)"))
        )
        until(lambda: "began" in (tmp_path / "job-1" / "job.log").read_text())
        whole.stop_controller()
        assert launcher.poll([handle]) == {handle: JobState.RUNNING}
        whole.start_controller()
        assert wait(launcher, handle, until={JobState.FINISHED, JobState.LOST}) is JobState.FINISHED
        assert launcher.fetch(handle).status == "ok"

    def test_a_job_that_cannot_begin_for_want_of_a_controller_is_no_failure(
        self, whole: SlurmCluster, tmp_path: Path
    ) -> None:
        launcher = whole.launcher(root=tmp_path, setup=["sleep 4"])
        handle = launcher.submit(plan(GOOD))
        wait(launcher, handle, until={JobState.RUNNING})
        whole.stop_controller()
        until(lambda: (tmp_path / "job-1" / "ended.json").exists())
        whole.start_controller()
        wait(launcher, handle, until={JobState.FINISHED})
        measurement = launcher.fetch(handle)
        assert measurement.status == "preempted", (tmp_path / "job-1" / "slurm.log").read_text()
        assert "Unable to contact slurm controller" in (measurement.cause or "")

    @pytest.mark.long
    def test_a_job_submitted_while_the_controller_is_away_runs_later_and_once(
        self, whole: SlurmCluster, tmp_path: Path
    ) -> None:
        whole.stop_controller()
        launcher = whole.launcher(root=tmp_path)
        handle = launcher.submit(plan(GOOD))
        assert launcher.poll([handle]) == {handle: JobState.QUEUED}
        assert launcher.find("job-1") == handle
        whole.start_controller()
        assert wait(launcher, handle, until={JobState.FINISHED, JobState.LOST}) is JobState.FINISHED
        assert launcher.fetch(handle).status == "ok"
        assert (tmp_path / "job-1" / "runs.txt").read_text() == "x"

    @pytest.mark.long
    def test_patience_with_a_controller_ends(self, whole: SlurmCluster, tmp_path: Path) -> None:
        launcher = whole.launcher(root=tmp_path, patience_s=0.5)
        handle = started(launcher)
        whole.stop_controller()
        with pytest.raises(LauncherError, match=r"not answered|[Uu]nable to contact"):
            wait(launcher, handle, until={JobState.LOST})
        whole.start_controller()
        launcher.cancel("job-1")
        wait(launcher, handle, until={JobState.CANCELLED})

    def test_a_controller_that_lost_its_memory(self, whole: SlurmCluster, tmp_path: Path) -> None:
        launcher = whole.launcher(root=tmp_path)
        done, gone = launcher.submit(plan(GOOD)), "job-2"
        wait(launcher, done, until={JobState.FINISHED})
        launcher.submit(
            plan("import time; print('began', flush=True); time.sleep(300)", job_name=gone)
        )
        until(lambda: "began" in (tmp_path / gone / "job.log").read_text())
        whole.stop_controller()
        for path in (whole.folder / "state").glob("job_state*"):
            path.unlink()
        whole.start_controller()
        assert wait(launcher, gone, until={JobState.LOST}) is JobState.LOST
        assert launcher.poll([done]) == {done: JobState.FINISHED}
        assert launcher.fetch(done).status == "ok"
        assert launcher.fetch(gone).status == "preempted"
        for process in processes(gone):  # nobody else remembers them
            with contextlib.suppress(psutil.Error):  # one ends with the other
                process.kill()
        await_the_end(gone)


@pytest.mark.parametrize(
    "damage",
    [
        "[os.remove(name) for name in os.listdir() if name != 'job.log']",
        "os.remove('claim'); os.remove('submitted.json'); os.remove('attempted')",
        "os.remove('submit.lock'); [os.mkfifo(name) for name in ('cancel', 'ended.json', "
        "'ended.json~', 'submit.lock')]",
        "open('job.json', 'w').write('[]'); os.remove('submitted.json'); "
        "os.mkdir('submitted.json')",
        "os.symlink('/nowhere', 'result.rank0.json'); os.symlink('/nowhere', 'cancel')",
        "os.rename(os.getcwd(), os.getcwd() + '.gone')",
    ],
)
def test_a_job_that_damages_its_folder_can_be_cancelled_and_starts_no_other(
    slurm: SlurmCluster, tmp_path: Path, damage: str
) -> None:
    launcher = slurm.launcher(root=tmp_path / "runs")
    told = tmp_path / "told"
    handle = launcher.submit(
        plan(f"import os, time\n{damage}\nopen({str(told)!r}, 'a').write('x')\ntime.sleep(300)")
    )
    wait(
        launcher, handle, until={JobState.RUNNING, JobState.LOST}
    )  # lost: its folder is gone already
    until(told.exists)
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            pool.submit(launcher.poll, [handle]).result(timeout=30)
        pool.submit(launcher.cancel, "job-1").result(timeout=60)
        await_the_end("job-1")
        until(lambda: not pool.submit(launcher.poll, [handle]).result(timeout=30)[handle].is_open)
    until(
        lambda: launcher.open_jobs() == []
    )  # the controller learns last that a job's node has ended it
    assert told.read_text() == "x"
