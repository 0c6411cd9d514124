"""What Slurm's programs print, kept as 22.05 printed it, against the table of states; and how
sparingly they are asked.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hp_tool.cluster.launchers import slurm_controller
from hp_tool.cluster.launchers.slurm_controller import (
    NEVER_STARTS,
    Controller,
    ControllerUnreachableError,
    Site,
    job_state,
    parse_accounting,
    parse_elapsed_s,
    parse_queue,
)
from hp_tool.cluster.launchers.slurm_controller import controller as shared_controller
from hp_tool.domain.states import JobState
from hp_tool.errors import LauncherError

OUTPUT = Path(__file__).parent / "slurm_output"
QUEUE = (OUTPUT / "squeue-22.05.txt").read_text()
ACCOUNTING = (OUTPUT / "sacct-22.05.txt").read_text()


def test_the_queue_is_read_whole() -> None:
    jobs = {job.id: job for job in parse_queue(QUEUE)}
    assert len(jobs) == len(QUEUE.splitlines()) == 18
    assert jobs[17].folder == "/tmp/hp2/a|b c"
    assert (jobs[4].state, jobs[4].elapsed_s) == ("PREEMPTED", 103.0)
    assert [
        job.id for job in jobs.values() if job.state == "PENDING" and job.reason in NEVER_STARTS
    ] == [18]


@pytest.mark.parametrize(
    ("job_id", "state"),
    [
        (1, JobState.FINISHED),
        (2, JobState.FINISHED),
        (3, JobState.PREEMPTED),  # cancelled, and not by us
        (4, JobState.PREEMPTED),
        (11, JobState.FINISHED),  # its time was up
        (13, JobState.PREEMPTED),  # its node went down
        (14, JobState.QUEUED),  # requeued
        (15, JobState.RUNNING),  # suspended
        (16, JobState.RUNNING),
    ],
)
def test_states_of_the_queue(job_id: int, state: JobState) -> None:
    (job,) = (job for job in parse_queue(QUEUE) if job.id == job_id)
    assert job_state(job.state, cancelled_by_us=False) is state


def test_states_of_the_accounting() -> None:
    jobs = {job.id: job for job in parse_accounting(ACCOUNTING)}
    assert (jobs[23].state, jobs[23].elapsed_s) == ("CANCELLED by 0", 37.0)
    assert job_state(jobs[23].state, cancelled_by_us=True) is JobState.CANCELLED
    assert job_state(jobs[23].state, cancelled_by_us=False) is JobState.PREEMPTED
    assert job_state(jobs[27].state, cancelled_by_us=False) is JobState.PREEMPTED
    assert job_state(jobs[25].state, cancelled_by_us=False) is JobState.FINISHED
    assert len(jobs) == len(ACCOUNTING.splitlines())


def test_lines_that_are_no_jobs_are_passed_over() -> None:
    odd = (
        "7|RUNNING|None|0:01|n1|N/A|/runs/a\nb|c\nslurm_load_jobs: "
        "hello\n8|FAILED|None|INVALID|n2|N/A|/runs/b\n"
    )
    assert [(job.id, job.elapsed_s) for job in parse_queue(odd)] == [(7, 1.0), (8, None)]


def test_a_word_from_a_newer_slurm_is_not_an_end() -> None:
    assert job_state("REPLICATING", cancelled_by_us=False) is JobState.RUNNING


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:00", 0.0),
        ("1:29", 89.0),
        ("02:03:04", 7384.0),
        ("1-00:00:01", 86401.0),
        ("N/A", None),
        ("", None),
    ],
)
def test_elapsed_times(text: str, expected: float | None) -> None:
    assert parse_elapsed_s(text) == expected


class Programs:
    """In place of Slurm's programs: counts the questions, and answers or fails as told."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.error: LauncherError | None = None
        self.answer = QUEUE

    def __call__(self, command: list[str], **_: Any) -> str:
        self.asked.append(command)
        if self.error is not None:
            raise self.error
        return self.answer


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    made = Programs()
    monkeypatch.setattr(slurm_controller, "_run", made)
    return made


def test_many_questions_are_one_query(programs: Programs) -> None:
    controller = Controller(poll_s=60.0)
    for _ in range(100):
        assert len(controller.jobs()) == 18
    assert len(programs.asked) == 1


def test_a_fresh_answer_waits_until_it_is_due(programs: Programs) -> None:
    controller = Controller(poll_s=0.2)
    controller.jobs()
    before = time.time()
    controller.jobs(fresh=True)
    assert len(programs.asked) == 2 and controller.asked_at >= before


def test_a_fresh_answer_waits_for_what_another_process_asked(
    programs: Programs, tmp_path: Path
) -> None:
    """Twenty workers that each want the queue as of now are one squeue an interval, too."""
    poll_s, workers = 0.3, 20
    began = time.time()
    pollers = [Controller(poll_s=poll_s, shared=tmp_path / "shared") for _ in range(workers)]
    pollers[0].jobs()
    wanted_at = time.time()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda poller: poller.jobs(fresh=True), pollers))
    assert 2 <= len(programs.asked) <= 1 + (time.time() - began) / poll_s
    assert all(poller.asked_at >= wanted_at for poller in pollers)


def test_threads_and_processes_share_a_poller(programs: Programs, tmp_path: Path) -> None:
    """The launchers of one process have one; another process's finds its answer in the folder of
    the runs.
    """
    site = Site()
    one, same = (
        shared_controller(poll_s=60.0, site=site, folder=tmp_path / "runs") for _ in range(2)
    )
    assert one is same
    with ThreadPoolExecutor(8) as pool:
        assert all(len(answer) == 18 for answer in pool.map(lambda _: one.jobs(), range(50)))
    (file,) = (tmp_path / "runs").iterdir()
    elsewhere = Controller(poll_s=60.0, shared=file)
    assert elsewhere.jobs() == one.jobs() and elsewhere.asked_at == one.asked_at
    assert len(programs.asked) == 1
    file.write_text("[1.0, ")  # cut off by a crash
    assert len(Controller(poll_s=60.0, shared=file).jobs()) == 18
    assert len(programs.asked) == 2 and json.loads(file.read_text())[1] == QUEUE


def test_clusters_of_a_federation_are_named_to_every_program(
    programs: Programs, tmp_path: Path
) -> None:
    programs.answer = (
        "CLUSTER: east\n7|RUNNING|None|0:01|n1|N/A|/runs/a\nCLUSTER: "
        "west\n8|PENDING|Priority|0:00||N/A|/runs/b\n"
    )
    controller = Controller(poll_s=60.0, site=Site(clusters=("east", "west")))
    assert [(job.id, job.cluster) for job in controller.jobs()] == [(7, "east"), (8, "west")]
    controller.cancel(controller.jobs())
    programs.answer = "9;east\n"
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n")
    assert controller.submit(tmp_path / "job.sbatch", environment={}) == 9
    queue, east, west, _ = programs.asked
    assert queue[:2] == ["squeue", "--clusters=east,west"]
    assert (east, west) == (
        ["scancel", "--clusters=east", "7"],
        ["scancel", "--clusters=west", "8"],
    )


def test_programs_run_on_a_login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh stands for itself by running what it is told, in a shell as the login node's would be."""
    (tmp_path / "ssh").write_text(
        '#!/bin/bash\necho "$@" >> "$(dirname "$0")/asked"\nshift 4\nexec bash -c "$*"\n'
    )
    (tmp_path / "sbatch").write_text(
        '#!/bin/bash\necho "$A|$(cat)|$*" > "$(dirname "$0")/seen"; echo 12\n'
    )
    for name in ("ssh", "sbatch"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "my runs").mkdir()
    script = tmp_path / "my runs" / "job.sbatch"
    script.write_text("#!/bin/bash\ntrue")
    controller = Controller(poll_s=1.0, site=Site(ssh="me@login1"))
    assert (
        controller.submit(script, environment={"A": "b $(c) 'd'", "PATH": "/of/the/worker"}) == 12
    )
    assert (
        tmp_path / "seen"
    ).read_text() == f"b $(c) 'd'|#!/bin/bash\ntrue|--parsable --chdir={script.parent}\n"
    asked = (tmp_path / "asked").read_text()
    assert (
        asked.startswith("-oBatchMode=yes -oConnectTimeout=10 me@login1 -- env LC_ALL")
        and "/of/the/worker" not in asked
    )
    (tmp_path / "ssh").write_text(
        "#!/bin/bash\necho 'Permission denied (publickey).' >&2; exit 255\n"
    )
    with pytest.raises(ControllerUnreachableError, match="Permission denied"):
        controller.submit(script, environment={})


def test_a_controller_that_is_away_is_asked_less_and_less(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(slurm_controller.time, "monotonic", lambda: now[0])
    controller, programs.error = (
        Controller(poll_s=1.0),
        LauncherError("Unable to contact slurm controller"),
    )
    asked_at = []
    for _ in range(3000):
        before = len(programs.asked)
        with pytest.raises(ControllerUnreachableError):
            controller.jobs(fresh=True)
        if len(programs.asked) > before:
            asked_at.append(now[0] - 1000.0)
        now[0] += 0.1
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert [round(pause) for pause in pauses[:8]] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert controller.away_s == pytest.approx(300.0, abs=1.0)
    programs.error, now[0] = None, now[0] + 60.0
    assert len(controller.jobs()) == 18
    assert controller.away_s == 0.0
