"""The state of a Slurm job by the files in its folder, with or without the controller.

The folder, which is the job's working directory, identifies the job: any process with the folder finds the job in the queue,
even if the process that submitted it is gone.

    job.json         the job to submit; from here on the job exists for us
    attempted        a submission was started; its answer may have been lost
    submitted.json   the controller accepted it, under this id
    refused          Slurm will not run it, for this reason
    claim            written by the job when it starts: of two submissions for one folder, only the job with this id runs
    cancel           written by a launcher, perhaps before the job is submitted: end the job, or never start it
    ended.json       written by the job when it ends
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hp_tool.domain.ports import JobState
from hp_tool.launchers import jobs
from hp_tool.launchers.outcome import Ending, recorded
from hp_tool.launchers.slurm_controller import Job

JOB = "job.json"
ATTEMPTED = "attempted"
SUBMITTED = "submitted.json"
REFUSED = "refused"
CLAIM = "claim"
CANCEL = "cancel"
ENDED = "ended.json"
RANK_RESULTS = "result.rank*.json"
SLURM_LOG = "slurm.log"
"""Output of the batch step itself and of Slurm's programs; the job's own output is in job.log."""
_FILES_LAG_S = 10.0
# The controller did not answer srun, or a node failed: not the configuration's fault.
_NOT_BEGUN = re.compile(
    r"srun: error: (Unable to (confirm allocation|create step)|Task launch for .* failed|Application launch failed).*"
)
_TIMEOUT_CODES = (124, 137)  # timeout's own, and where it had to kill


def claimed_by(folder: Path) -> int | None:
    """The id of the Slurm job that runs or ran in this folder."""
    try:
        text = (folder / CLAIM).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def state(folder: Path) -> JobState:
    """The state of the job by its folder alone."""
    if (folder / ENDED).exists():
        return JobState.CANCELLED if (folder / CANCEL).exists() else JobState.FINISHED
    return JobState.RUNNING if (folder / CLAIM).exists() else JobState.QUEUED


def await_files(folder: Path, *, bring: Callable[[], None]) -> None:
    """Wait for the files of an ended job: a shared file system may lag seconds behind the scheduler.

    `bring` fetches those that are not written into the folder itself.
    """
    deadline = time.monotonic() + _FILES_LAG_S
    while time.monotonic() < deadline:
        bring()
        names = os.listdir(folder)  # noqa: PTH208 - opening the folder makes a network file system look again
        if ENDED in names or jobs.RESULT in names:
            return
        time.sleep(0.2)


def ending(folder: Path, *, state: JobState, job: Job | None, timeout_s: float) -> Ending:
    """How a job ended: by Slurm's state if Slurm ended it, else by the job's own record."""
    record = jobs.read_json(folder / ENDED)
    wall_s = _wall_s(record) if record else job.elapsed_s if job else None
    slurm_state = job.state if job else ""
    if state is JobState.CANCELLED:
        return Ending(reason="cancelled", wall_s=wall_s)
    if state is JobState.PREEMPTED:
        return Ending(reason="terminated", wall_s=wall_s, error=f"Slurm ended the job: {slurm_state}")
    if state is JobState.LOST:
        return Ending(reason="lost", error="Slurm no longer knows the job, and it left no record of its end")
    if (folder / REFUSED).exists():
        return Ending(reason="failed_to_start", error=f"Slurm will not run the job: {(folder / REFUSED).read_text()}")
    if slurm_state == "TIMEOUT":
        return Ending(reason="timeout", wall_s=wall_s)
    if slurm_state == "OUT_OF_MEMORY":
        return Ending(reason="exited", exit_code=137, oom_kills=1, wall_s=wall_s)
    slurm_log = jobs.log_tail(folder, name=SLURM_LOG)
    if not_begun := _NOT_BEGUN.search(slurm_log):
        return Ending(reason="terminated", wall_s=wall_s, error=not_begun[0])
    if record is None or not (folder / jobs.LOG).exists():
        error = f"the batch script ended before the job started: {jobs.last_line(slurm_log)}"
        return Ending(reason="failed_to_start", wall_s=wall_s, error=error)
    if "reason" in record:  # written by the supervisor, through the log
        return recorded(record)
    if record["exit_code"] in _TIMEOUT_CODES and wall_s is not None and wall_s >= timeout_s:
        return Ending(reason="timeout", wall_s=wall_s)
    return Ending(reason="exited", exit_code=record["exit_code"], wall_s=wall_s)


def _wall_s(record: Mapping[str, Any]) -> float | None:
    if "wall_s" in record:
        return float(record["wall_s"])
    return max(record["ended_at"] - record["started_at"], 0.0) if "ended_at" in record else None
