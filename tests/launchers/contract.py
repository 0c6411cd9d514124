"""What every launcher promises (hp_tool.domain.ports.Launcher), checked with small scripts in place
of training jobs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.ports import Launcher
from hp_tool.domain.states import JobState
from hp_tool.loop.tuning import Sweeper
from hp_tool.store import open_store
from tests.launchers.slurm_cluster import until
from tests.store.acting import claimed, intended

_ENDED = {JobState.FINISHED, JobState.CANCELLED, JobState.PREEMPTED, JobState.LOST}

GOOD = """
import json, os, pathlib
runs = pathlib.Path("runs.txt"); runs.open("a").write("x")
pathlib.Path("~r").write_text(json.dumps({"status": "ok", "step_s": 0.5, "losses": [2.0, 1.0]}))
os.rename("~r", "result.json")
"""
# A job whose child leads a session of its own and ignores polite signals, as torchrun's ranks may.
STUBBORN = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", child, sys.argv[1]], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("started", flush=True)
time.sleep(300)
"""


def plan(script: str, *, job_name: str = "job-1", timeout_s: float = 300.0) -> LaunchPlan:
    """A launch plan that runs `script` in the job's folder."""
    return LaunchPlan(
        job_name=job_name,
        command=(sys.executable, "job.py", _mark(job_name)),
        environment={"MARK_OF_TEST": job_name},
        files={"job.py": script},
        num_gpus=1,
        timeout_s=timeout_s,
    )


def wait(
    launcher: Launcher, handle: str, *, until: set[JobState], limit_s: float = 300.0
) -> JobState:
    """Poll until the job is in one of the states; fails after limit_s."""
    deadline = time.monotonic() + limit_s
    while True:
        began = time.monotonic()
        state = launcher.poll([handle])[handle]
        if state in until:
            return state
        asked = time.monotonic()
        assert asked < deadline, f"still {state}"
        time.sleep(
            0.02 + 2.0 * (asked - began)
        )  # asking may start a process: the job needs the processor too


def _mark(job_name: str) -> str:
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[
        0
    ]  # other tests and sessions on this machine have a job-1 too
    return f"--mark-of-{job_name}-{os.getpid()}-{zlib.crc32(test.encode()):x}"


def processes(job_name: str) -> list[psutil.Process]:
    """The job's live processes, whatever their parents and sessions."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.cmdline()[-1:] == [_mark(job_name)]
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def started(launcher: Launcher, script: str = STUBBORN, **options: float) -> str:
    """Submit and wait until the job and its child live."""
    handle = launcher.submit(plan(script, **options))  # type: ignore[arg-type]
    wait(launcher, handle, until={JobState.RUNNING})
    deadline = time.monotonic() + 60
    while len(processes("job-1")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return handle


def await_the_end(job_name: str, *, limit_s: float = 300.0) -> None:
    """Wait until no process of the job lives: one that was killed is there until it has had its
    turn.
    """
    deadline = time.monotonic() + limit_s
    while alive := processes(job_name):
        assert time.monotonic() < deadline, [(each, each.parents()) for each in alive]
        time.sleep(0.1)


class Launching:
    """What every launcher's tests start from: subclasses override `new_launcher`."""

    @pytest.fixture
    def new_launcher(self) -> Callable[[], Launcher]:
        raise NotImplementedError

    @pytest.fixture
    def launcher(self, new_launcher: Callable[[], Launcher]) -> Launcher:
        return new_launcher()


class EngineContract(Launching):
    """What an engine does with a job, each in its own way."""

    def test_a_finished_job_brings_its_measurement(self, launcher: Launcher) -> None:
        handle = launcher.submit(plan(GOOD))
        assert wait(launcher, handle, until=_ENDED) is JobState.FINISHED
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.step_s, measurement.losses) == (
            "ok",
            0.5,
            (2.0, 1.0),
        )
        assert measurement.wall_s is not None and 0 < measurement.wall_s < 30

    def test_a_restarted_worker_finds_the_running_job(
        self, launcher: Launcher, new_launcher: Callable[[], Launcher], tmp_path: Path
    ) -> None:
        told = tmp_path / "end"
        handle = launcher.submit(
            plan(
                f"import os, time\nwhile not os.path.exists({str(told)!r}): time.sleep(0.1)\n"
                + GOOD
            )
        )
        other = new_launcher()
        assert other.find("job-1") == handle
        assert other.poll([handle])[handle] in (JobState.QUEUED, JobState.RUNNING)
        told.touch()
        assert wait(other, handle, until=_ENDED) is JobState.FINISHED
        assert other.fetch(handle).status == "ok"

    def test_cancel_ends_every_process(self, launcher: Launcher) -> None:
        handle = started(launcher)
        launcher.cancel("job-1")
        assert wait(launcher, handle, until=_ENDED) is JobState.CANCELLED
        assert processes("job-1") == []
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.cause) == ("preempted", "cancelled on request")
        launcher.cancel("job-1")  # harmless

    def test_a_sweep_ends_and_books_what_no_live_search_owns(
        self, launcher: Launcher, new_launcher: Callable[[], Launcher], tmp_path: Path
    ) -> None:
        """Of three jobs one's run was given up, one's is open, and one is another database's."""
        store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
        leases = [claimed(store) for _ in range(2)]
        stray, owned = (intended(store, lease) for lease in leases)
        names = [stray.job_name, owned.job_name, "hp-of-another-database"]
        sweeper = Sweeper(store=store, launcher_of=lambda query: new_launcher())
        try:
            script = "import time; time.sleep(1.5); print('half-way', flush=True); time.sleep(300)"
            handles = [launcher.submit(plan(script, job_name=name)) for name in names]
            until(lambda: "half-way" in launcher.output(handles[0]))
            store.abandon_run(lease=leases[0], run_id=stray.id, cause="given up")

            def cost() -> float | None:
                sweeper.sweep()
                return store.get_run(search_id=stray.search_id, run_id=stray.id).gpu_seconds

            until(cost)
            assert launcher.poll(handles[:1]) == {handles[0]: JobState.CANCELLED}
            wall_s = launcher.fetch(handles[0]).wall_s
            assert wall_s is not None and wall_s >= 1.0
            assert (
                cost()
                == store.get_search(search_id=stray.search_id).progress["gpu_seconds"]
                == pytest.approx(2 * wall_s)
            )
            assert sorted(launcher.open_jobs()) == sorted(names[1:])
            assert store.runs(search_id=owned.search_id) == [owned]
        finally:
            for name in names:
                launcher.cancel(name)
            until(lambda: launcher.open_jobs() == [])
            store.close()

    def test_the_time_limit_ends_every_process(self, launcher: Launcher) -> None:
        handle = launcher.submit(
            plan(STUBBORN, timeout_s=6.0)
        )  # the job speaks before it, on a busy machine too
        assert wait(launcher, handle, until=_ENDED) is JobState.FINISHED
        await_the_end("job-1")
        measurement = launcher.fetch(handle)
        assert measurement.status == "timeout"
        assert measurement.cause == "hit the 6 s limit"
        assert measurement.log_tail == "started\n"


class FurtherContract(Launching):
    """What else an engine does with a job: of one whose jobs take seconds to start, in the long
    run.
    """

    def test_submitting_a_name_again_starts_nothing(
        self, launcher: Launcher, new_launcher: Callable[[], Launcher]
    ) -> None:
        script = GOOD.replace('"ok"', '"ok", "versions": {"runs": runs.read_text()}')
        handle = launcher.submit(plan(script))
        assert launcher.submit(plan(script)) == handle
        wait(launcher, handle, until=_ENDED)
        assert new_launcher().submit(plan(script)) == handle
        wait(launcher, handle, until=_ENDED)
        assert launcher.fetch(handle).versions == {"runs": "x"}

    def test_an_engine_that_is_there_answers(self, launcher: Launcher) -> None:
        assert launcher.answers()
        assert launcher.find("job-1") is None

    def test_a_job_nobody_submitted_is_not_found(self, launcher: Launcher) -> None:
        assert launcher.find("never") is None
        assert launcher.poll(["never"]) == {"never": JobState.LOST}

    def test_a_cancelled_name_starts_nothing(
        self, launcher: Launcher, new_launcher: Callable[[], Launcher]
    ) -> None:
        """A worker that slept, and submits a job that was given up meanwhile."""
        new_launcher().cancel("job-1")
        handle = launcher.submit(plan(STUBBORN))
        assert wait(launcher, handle, until=_ENDED) is JobState.CANCELLED
        assert wait(new_launcher(), handle, until=_ENDED) is JobState.CANCELLED
        new_launcher().cancel("job-1")  # harmless
        assert (launcher.open_jobs(), processes("job-1")) == ([], [])

    def test_a_cancel_in_the_middle_of_a_submit_leaves_no_process(
        self, launcher: Launcher, new_launcher: Callable[[], Launcher]
    ) -> None:
        together = threading.Barrier(2)

        def cancel() -> None:
            together.wait()
            new_launcher().cancel("job-1")

        with ThreadPoolExecutor() as pool:
            cancelling = pool.submit(cancel)
            together.wait()
            handle = launcher.submit(plan(STUBBORN))
            cancelling.result()
        assert wait(launcher, handle, until=_ENDED) is JobState.CANCELLED
        assert (launcher.open_jobs(), processes("job-1")) == ([], [])

    def test_jobs_that_have_not_ended_are_listed(
        self, launcher: Launcher, new_launcher: Callable[[], Launcher]
    ) -> None:
        assert launcher.open_jobs() == []
        handle = launcher.submit(plan("import time; time.sleep(300)"))
        assert new_launcher().open_jobs() == ["job-1"]
        launcher.cancel("job-1")
        wait(launcher, handle, until=_ENDED)
        assert launcher.open_jobs() == []

    def test_what_a_finished_job_leaves_running_ends_with_it(self, launcher: Launcher) -> None:
        handle = launcher.submit(
            plan(
                STUBBORN.replace("time.sleep(300)\n", "", 1).replace(
                    '"\nsub', 'time.sleep(300)"\nsub'
                )
                + GOOD
            )
        )
        wait(launcher, handle, until=_ENDED)
        await_the_end("job-1")

    def test_a_crash_is_told_with_its_cause_and_the_end_of_the_log(
        self, launcher: Launcher
    ) -> None:
        handle = launcher.submit(
            plan("print('x' * 9000)\nraise ValueError('the fabric is on fire')")
        )
        assert wait(launcher, handle, until=_ENDED) is JobState.FINISHED
        measurement = launcher.fetch(handle)
        assert measurement.status == "crashed"
        assert (
            measurement.cause == "exit code 1 without a result: ValueError: the fabric is on fire"
        )
        assert measurement.log_tail is not None and len(measurement.log_tail) == 4096
        assert measurement.hardware is not None and measurement.hardware.num_gpus == 1

    def test_a_command_that_cannot_start_is_a_crash(self, launcher: Launcher) -> None:
        broken = LaunchPlan(
            job_name="job-1",
            command=("/no/such/program",),
            environment={},
            files={},
            num_gpus=1,
            timeout_s=9,
        )
        handle = launcher.submit(broken)
        wait(launcher, handle, until=_ENDED)
        measurement = launcher.fetch(handle)
        assert measurement.status == "crashed"
        assert "/no/such/program" in (measurement.cause or "")

    def test_secrets_stay_with_the_worker(
        self, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HP_DATABASE_URL", "postgresql://user:pa55word@host/db")
        monkeypatch.setenv("HP_API_KEY", "k3y-of-the-worker")
        script = GOOD.replace('"ok"', '"ok", "versions": {k: v for k, v in os.environ.items()}')
        handle = launcher.submit(plan(script))
        wait(launcher, handle, until=_ENDED)
        seen = launcher.fetch(handle).versions
        assert not {"pa55word", "k3y-of-the-worker"} & set(
            re.findall(r"[\w-]+", " ".join(seen.values()))
        )
        assert seen["MARK_OF_TEST"] == "job-1"

    @pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 129, "a b", "a\n"])
    def test_a_bad_job_name_is_refused(self, launcher: Launcher, name: str) -> None:
        from hp_tool.errors import InputError

        with pytest.raises(InputError, match="Job name"):
            launcher.submit(plan(GOOD, job_name=name))


class ResultContract(Launching):
    """What is read from a job's folder, wherever it ran: of an engine whose jobs take seconds to
    start, in the long run.
    """

    def test_a_result_that_is_a_pipe_hangs_nobody(self, launcher: Launcher) -> None:
        handle = launcher.submit(plan("import os; os.mkfifo('result.json')"))
        assert wait(launcher, handle, until=_ENDED) is JobState.FINISHED
        assert launcher.fetch(handle).status == "crashed"

    def test_a_result_counts_whatever_the_exit_code(self, launcher: Launcher) -> None:
        handle = launcher.submit(plan(GOOD + "os.abort()"))
        wait(launcher, handle, until=_ENDED)
        assert launcher.fetch(handle).status == "ok"

    @pytest.mark.parametrize(
        ("torn", "status"),
        [
            ("", "preempted"),
            ('{"status": "ok", "step_s": 0.', "preempted"),
            ('{"status": "ok", "surprise": 1}', "crashed"),
        ],
    )
    def test_a_torn_result_is_never_read(self, launcher: Launcher, torn: str, status: str) -> None:
        """One that was cut off is worth another try; one that means nothing will mean nothing
        again.
        """
        handle = launcher.submit(plan(f"open('result.json', 'w').write({torn!r})"))
        wait(launcher, handle, until=_ENDED)
        assert launcher.fetch(handle).status == status

    def test_the_rank_that_failed_first_of_its_own_is_the_cause(self, launcher: Launcher) -> None:
        accounts = {
            "result.rank0.json": {
                "status": "crashed",
                "cause": "rank 0: RuntimeError: Connection closed by peer",
            },
            "result.rank1.json": {
                "status": "oom",
                "cause": "rank 1: OutOfMemoryError: tried to allocate 2 GiB",
            },
            "result.rank2.json": {
                "status": "crashed",
                "cause": "rank 2: RuntimeError: Broken pipe",
            },
        }
        writes = [
            f"open({name!r}, 'w').write({json.dumps(account)!r})"
            for name, account in accounts.items()
        ]
        script = "\n".join([*writes, "raise SystemExit(1)"])
        handle = launcher.submit(plan(script))
        wait(launcher, handle, until=_ENDED)
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.cause) == (
            "oom",
            "rank 1: OutOfMemoryError: tried to allocate 2 GiB",
        )


class LauncherContract(EngineContract, FurtherContract, ResultContract):
    """Subclass it as Test<Launcher> with a `new_launcher` fixture: a function that makes another
    object over the same jobs.
    """
