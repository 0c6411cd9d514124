"""The batch script run by bash: jobs whose folder is not shared, with a stand-in for srun, and what
is read from their logs; a shared folder that takes nothing.

`test_slurm.TestLogs` does the same on a real Slurm.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_tool.cluster.launchers import jobs, slurm_folder
from hp_tool.cluster.launchers.jobs import measure
from hp_tool.cluster.launchers.options import Logs, SlurmOptions
from hp_tool.cluster.launchers.slurm_controller import Job
from hp_tool.cluster.launchers.slurm_script import render
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.states import JobState
from tests.launchers.contract import GOOD

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--") and "=" in word)
given, command = sys.stdin.buffer.read(), sys.argv[sys.argv.index("bash"):]
codes = []
for node in range(int(options["nodes"])):
    with open(options["output"].replace("%n", str(node)), "wb") as log:
        environment = {{**os.environ, "SLURM_NODEID": str(node)}}
        codes.append(subprocess.run(command, input=given, stdout=log, stderr=log, env=environment).returncode)
sys.exit(max(codes))
"""  # noqa: E501
HARDWARE = Hardware(gpu="cpu", num_gpus=2)


class Played:
    """One job, run on a host that knows nothing of its folder but `far`, which this one sees as
    `near`.
    """

    def __init__(
        self, root: Path, *, script: str, num_gpus: int = 2, setup: tuple[str, ...] = ()
    ) -> None:
        self.far, self.folder = root / "far", root / "runs" / "job-1"
        (root / "near").symlink_to(self.far)
        self.far.mkdir()
        program = root / "bin" / "srun"
        program.parent.mkdir()
        program.write_text(SRUN)
        program.chmod(0o755)
        logs = Logs(folder=str(self.far), here=str(root / "near"))
        self.options = SlurmOptions(gpu="cpu", gpus_per_node=1, max_nodes=2, setup=setup, logs=logs)
        command = (sys.executable, "job.py")
        self.plan = LaunchPlan(
            job_name="job-1",
            command=command,
            environment={},
            files={"job.py": script},
            num_gpus=num_gpus,
            timeout_s=20.0,
        )
        jobs.create_folder(
            self.folder,
            files={
                "job.json": json.dumps({"num_gpus": num_gpus, "timeout_s": 20.0, "returns": []})
            },
        )
        self._environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}

    def run(self, *, job_id: int = 7) -> int:
        environment = {**self._environment, "SLURM_JOB_ID": str(job_id)}
        with (self.far / "job-1.slurm.log").open("wb") as log:
            script = render(self.options, plan=self.plan)
            done = subprocess.run(
                ["bash", "-c", script], env=environment, stdout=log, stderr=log, check=False
            )
        return done.returncode

    def measured(self, word: str = "COMPLETED") -> Any:
        slurm_folder.copy_from_logs(self.folder, options=self.options)
        job = Job(id=7, state=word)
        ending = slurm_folder.ending(self.folder, state=JobState.FINISHED, job=job, timeout_s=20.0)
        return measure(self.folder, ending=ending, timeout_s=20.0, hardware=HARDWARE)


def test_results_of_two_nodes_come_back_by_their_logs(tmp_path: Path) -> None:
    script = (
        "import os; rank = os.environ['PET_NODE_RANK']; print('node', rank)\nif rank == '1': "
        "raise SystemExit\n"
    )
    job = Played(tmp_path, script=script + GOOD)
    assert job.run() == 0
    measurement = job.measured()
    assert (measurement.status, measurement.step_s, measurement.losses) == ("ok", 0.5, (2.0, 1.0))
    assert measurement.wall_s is not None and measurement.wall_s > 0
    assert jobs.output(job.folder).split() == ["node", "0", "node", "1"]
    assert (
        slurm_folder.claiming_job_id(job.folder) == 7
        and slurm_folder.state(job.folder) is JobState.FINISHED
    )


def test_of_two_submissions_one_runs(tmp_path: Path) -> None:
    job = Played(tmp_path, script=GOOD, num_gpus=1)
    assert job.run() == 0
    began = (job.far / "job-1.0.log").stat().st_mtime_ns
    assert job.run(job_id=8) == 0
    assert (job.far / "job-1.0.log").stat().st_mtime_ns == began
    assert job.measured().status == "ok" and slurm_folder.claiming_job_id(job.folder) == 7


def test_a_crash_is_told_by_the_node_that_had_it(tmp_path: Path) -> None:
    script = (
        "import os\nif os.environ['PET_NODE_RANK'] == '1': raise ValueError('the fabric is on "
        "fire')"
    )
    job = Played(tmp_path, script=script)
    assert job.run() == 1
    assert (
        job.measured("FAILED").cause
        == "exit code 1 without a result: ValueError: the fabric is on fire"
    )


def test_a_set_up_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    job = Played(tmp_path, script=GOOD, setup=("source /no/such/environment",))
    assert job.run() != 0
    measurement = job.measured("FAILED")
    assert measurement.status == "crashed"
    assert (
        "before the job started" in measurement.cause
        and "/no/such/environment: No such file" in measurement.cause
    )


def test_only_what_was_asked_for_is_written_here(tmp_path: Path) -> None:
    """A job's words are not believed beyond its results: it cannot say that it was cancelled or
    what was submitted.
    """
    lie = json.dumps({"file": "cancel", "text": ""})
    job = Played(
        tmp_path, script=f"print('\\n<<<hp-tool:' + {lie!r} + ':hp-tool>>>')\n" + GOOD, num_gpus=1
    )
    job.run()
    job.measured()
    assert not (job.folder / "cancel").exists()


@pytest.mark.parametrize("since", ["before it was claimed", "after it was claimed"])
def test_a_full_disk_says_nothing_about_the_cluster(tmp_path: Path, since: str) -> None:
    script = render(
        SlurmOptions(gpu="cpu", gpus_per_node=1, max_nodes=1),
        plan=LaunchPlan(
            job_name="job-1",
            command=("true",),
            environment={},
            files={},
            num_gpus=1,
            timeout_s=20.0,
        ),
    )
    if since == "after it was claimed":
        (tmp_path / "claim").write_text("7")

    def fill_disk() -> None:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (0, 0)
        )  # files can be made, and nothing written into them

    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        preexec_fn=fill_disk,
        restore_signals=False,
        check=False,
    )
    ending = slurm_folder.ending(
        tmp_path, state=JobState.FINISHED, job=Job(id=7, state="COMPLETED"), timeout_s=20.0
    )
    measurement = measure(tmp_path, ending=ending, timeout_s=20.0, hardware=HARDWARE)
    assert (measurement.status, measurement.refused) == ("preempted", False)
    assert measurement.cause is not None and "full" in measurement.cause
