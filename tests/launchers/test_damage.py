"""Jobs that damage what lies in their own folder: they end as failed runs, and nobody else waits
for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_tool.cluster.launchers import create
from hp_tool.cluster.launchers.options import SlurmOptions
from hp_tool.cluster.launchers.slurm_script import render
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.ports import Launcher
from hp_tool.domain.states import JobState
from hp_tool.errors import InputError, LauncherError
from hp_tool.loop.tuning import Sweeper
from hp_tool.store import open_store
from tests.launchers.contract import GOOD, await_the_end, plan, processes, wait
from tests.launchers.slurm_cluster import until
from tests.store.acting import claimed, intended

pytestmark = pytest.mark.components

ENDED = {JobState.FINISHED, JobState.CANCELLED, JobState.PREEMPTED, JobState.LOST}
DAMAGE = {
    "lock removed": "os.remove('lock')",
    "lock a pipe": "os.remove('lock'); os.mkfifo('lock')",
    "lock a folder": "os.remove('lock'); os.mkdir('lock')",
    "lock a link": "os.remove('lock'); os.symlink('/nowhere', 'lock')",
    "lock new": "os.remove('lock'); open('lock', 'w').close()",
    "report a dangling link": "os.symlink('/nowhere', 'result.rank0.json')",
    "report a pipe": "os.mkfifo('result.rank0.json')",
    "result a folder": "os.mkdir('result.json')",
    "end told beforehand": "open('ended.json', 'w').write(json.dumps({'reason': 'exited', "
    "'exit_code': 0, 'wall_s': 0.0}))",
    "end a pipe": "os.mkfifo('ended.json'); os.mkfifo('~ended.json')",
    "end a folder": "os.mkdir('ended.json'); os.mkdir('~ended.json')",
    "job rewritten": "open('job.json', 'w').write(json.dumps({'timeout_s': 'soon', 'num_gpus': "
    "[8]}))",
    "job a list": "open('job.json', 'w').write('[]')",
    "start removed": "os.remove('started.json')",
    "start a link": "os.remove('started.json'); os.symlink('/nowhere', 'started.json')",
    "cancel a dangling link": "os.symlink('/nowhere', 'cancel')",
    "log a pipe": "os.remove('job.log'); os.mkfifo('job.log')",
    "folder removed": "shutil.rmtree(os.getcwd())",
    "folder a file": "shutil.rmtree(os.getcwd()); open(HERE, 'w').close()",
    "folder a dangling link": "os.rename(HERE, HERE + '.gone'); os.symlink('/nowhere', HERE)",
    "folder a link": "os.rename(HERE, HERE + '.gone'); os.symlink(HERE + '.gone', HERE)",
    "all names folders": "[os.remove(n) for n in os.listdir()]; [os.mkdir(n) for n in NAMES]",
}
NAMES = (
    "lock",
    "started.json",
    "running.json",
    "ended.json",
    "job.json",
    "cancel",
    "job.log",
    "result.json",
)
SCRIPT = """
import json, os, shutil, sys, time
HERE, NAMES = os.getcwd(), {names}
{damage}
print("damaged", file=open({told!r}, "w"))
time.sleep({rest})
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = create("local", root=tmp_path / "runs", cpu_only=True)
    yield launcher
    for name in ("job-1", "job-2"):
        for process in processes(name):
            process.kill()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For calls that might never return."""
    pool = ThreadPoolExecutor()
    yield pool
    pool.shutdown(wait=False, cancel_futures=True)


def _start(launcher: Launcher, damage: str, *, rest_s: float, told: Path) -> str:
    handle = launcher.submit(
        plan(SCRIPT.format(damage=DAMAGE[damage], names=NAMES, told=str(told), rest=rest_s))
    )
    until(told.exists)
    return handle


def _measured(launcher: Launcher, handle: str) -> Measurement | None:
    try:
        return launcher.fetch(handle)
    except LauncherError:
        return None


def _ends_and_others_run(launcher: Launcher, handle: str) -> Measurement | None:
    """What the ended job brought; another one runs after it."""
    wait(launcher, handle, until=ENDED)
    measurement = _measured(launcher, handle)
    assert measurement is None or measurement.status in ("crashed", "preempted")
    assert launcher.open_jobs() == []
    await_the_end("job-1")
    other = launcher.submit(plan(GOOD, job_name="job-2"))
    assert wait(launcher, other, until=ENDED) is JobState.FINISHED
    assert launcher.fetch(other).status == "ok"
    return measurement


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_job_that_damages_its_folder_can_be_cancelled(
    damage: str, launcher: Launcher, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    handle = _start(launcher, damage, rest_s=300.0, told=tmp_path / "told")
    pool.submit(launcher.poll, [handle]).result(timeout=60)
    pool.submit(launcher.cancel, "job-1").result(timeout=60)
    pool.submit(_ends_and_others_run, launcher, handle).result(timeout=120)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_job_can_harm_only_its_own_run(
    damage: str, launcher: Launcher, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    handle = _start(launcher, damage, rest_s=0.5, told=tmp_path / "told")
    measurement = pool.submit(_ends_and_others_run, launcher, handle).result(timeout=120)
    if (
        measurement is not None
        and measurement.status == "crashed"
        and damage.split()[0] in ("lock", "end")
    ):
        assert measurement.cause and (
            "damaged" in measurement.cause or "without a result" in measurement.cause
        )
    written = {path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith("~")}
    assert written <= {"job-1", "job-1.gone", "job-2"}


def test_a_job_is_over_when_its_processes_are_not_when_it_says_so(
    launcher: Launcher, tmp_path: Path
) -> None:
    handle = _start(launcher, "end told beforehand", rest_s=2.0, told=tmp_path / "told")
    assert launcher.poll([handle]) == {handle: JobState.RUNNING}
    wait(launcher, handle, until=ENDED)
    wall_s = launcher.fetch(handle).wall_s
    assert wall_s is not None and wall_s > 1.0


def test_nothing_is_written_through_a_folder_that_became_a_link(
    launcher: Launcher, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "result.json").write_text(json.dumps({"status": "ok", "step_s": 0.5}))
    (victim / "job.json").write_text("{}")
    swap = f"os.rename(HERE, HERE + '.gone'); os.symlink({str(victim)!r}, HERE)"
    DAMAGE["folder another's"] = swap
    try:
        handle = _start(launcher, "folder another's", rest_s=300.0, told=tmp_path / "told")
    finally:
        del DAMAGE["folder another's"]
    launcher.cancel("job-1")
    wait(launcher, handle, until=ENDED)
    await_the_end("job-1")
    assert sorted(path.name for path in victim.iterdir()) == ["job.json", "result.json"]
    assert "link" in (launcher.fetch(handle).cause or "")


def test_a_sweep_passes_over_a_damaged_folder_to_the_next(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The bookings of three given-up runs, whose first two jobs rewrote their own job.json."""
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    leases = [claimed(store) for _ in range(3)]
    runs = [intended(store, lease) for lease in leases]
    said: list[dict[str, Any] | list[int]] = [{"timeout_s": "soon", "num_gpus": [8]}, [], {}]
    for run, wrong in zip(runs, said, strict=True):
        script = (
            f"import json, time; time.sleep(1); open('job.json', 'w').write({json.dumps(wrong)!r})"
            if wrong != {}
            else GOOD
        )
        handle = launcher.submit(
            plan("import time; time.sleep(1)\n" + script, job_name=run.job_name)
        )
        wait(launcher, handle, until=ENDED)
    for lease, run in zip(leases, runs, strict=True):
        store.abandon_run(lease=lease, run_id=run.id, cause="given up")
    Sweeper(store=store, launcher_of=lambda query: launcher).sweep()
    booked = [store.get_run(search_id=run.search_id, run_id=run.id).gpu_seconds for run in runs]
    assert all(each is not None and each > 0.5 for each in booked), booked
    store.close()


def test_a_log_without_end_ends_the_run(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HP_JOB_LOG_MIB", "4")
    handle = launcher.submit(plan("while True: print('x' * 4096)"))
    assert wait(launcher, handle, until=ENDED) is JobState.FINISHED
    measurement = launcher.fetch(handle)
    assert measurement.status == "crashed" and "the log exceeded 4 MiB" in (measurement.cause or "")
    monkeypatch.setenv("HP_JOB_LOG_MIB", "much")
    with pytest.raises(InputError, match="HP_JOB_LOG_MIB"):
        launcher.submit(plan(GOOD, job_name="job-2"))


def test_who_can_read_the_runs_folder_can_not_hold_the_devices(
    launcher: Launcher, tmp_path: Path
) -> None:
    lock = tmp_path / "runs" / "~devices"
    lock.parent.mkdir()
    lock.touch(0o644)
    wait(launcher, launcher.submit(plan(GOOD)), until=ENDED)
    assert lock.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "host", ["node1\n#SBATCH --uid=0", "a,b", "--exclude", "x" * 254, "node 1", "$(id)"]
)
def test_nodes_that_a_job_names_are_host_names(
    launcher: Launcher, tmp_path: Path, host: str
) -> None:
    """They reach the batch scripts of later jobs."""
    for where in ({"suspects": [host]}, {"hardware": {"gpu": "cpu", "hosts": [host]}}):
        result = {"status": "preempted", "cause": "rank 0: its GPU fell off the bus"} | where
        name = f"job-{1 + ('hardware' in where)}"
        handle = launcher.submit(
            plan(f"open('result.rank0.json', 'w').write({json.dumps(result)!r})", job_name=name)
        )
        wait(launcher, handle, until=ENDED)
        measurement = launcher.fetch(handle)
        assert (
            measurement.suspects == ()
            and host not in (measurement.hardware or Hardware(gpu="cpu")).hosts
        )
    options = SlurmOptions(gpu="cpu", gpus_per_node=1)
    script = render(options, plan=replace(plan(GOOD), excluded_hosts=(host, "node-7.cluster_a")))
    assert [line for line in script.splitlines() if "exclude" in line] == [
        "#SBATCH --exclude=node-7.cluster_a"
    ]


def test_a_folder_replaced_by_a_link_to_nothing_is_a_failed_run(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Not an error of the launcher, which would end the search."""
    handle = _start(launcher, "folder a dangling link", rest_s=0.5, told=tmp_path / "told")
    wait(launcher, handle, until=ENDED)
    measurement = launcher.fetch(handle)
    assert measurement.status == "crashed" and "link" in (measurement.cause or "")
