"""The folder of a Slurm job, whose files give its state with or without the controller.

The folder is the job's working directory and identifies the job: any process with the folder finds
the job in the queue, even if the process that submitted it is gone.

    job.json         the job to submit; it exists from here on
    attempted        a submission was started; its answer may have been lost
    submitted.json   the controller accepted it, with this id
    refused          Slurm will not run it, for this reason
    claim            written by the job when it starts: of two submissions for one folder, only the job with this id runs
    cancel           written by a launcher, perhaps before the job is submitted: end the job, or never start it
    ended.json       written by the job when it ends

If the nodes do not share the folder, a job's files travel in its batch script, and its results are
read from its logs. Slurm writes these on the nodes to a folder that must be readable here:

    NAME.claim        id of the Slurm job that runs under this name
    NAME.ended.json   how the batch step ended
    NAME.slurm.log    output of the batch step and of Slurm's programs
    NAME.<n>.log      output of the n-th node: the job's log, its results and how it ended (`streamed`)

`copy_from_logs` writes these into the local folder, as a job with a shared folder would.
"""  # noqa: E501

import contextlib
import json
import math
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from hp_tool.cluster.launchers import jobs, readback, streamed, supervisor
from hp_tool.cluster.launchers.jobs import Ending, parse_ending
from hp_tool.cluster.launchers.options import Logs, SlurmOptions
from hp_tool.cluster.launchers.readback import path_exists
from hp_tool.cluster.launchers.slurm_controller import Job, job_state
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.states import JobState
from hp_tool.errors import InputError

JOB = "job.json"
ATTEMPTED = "attempted"
SUBMITTED = "submitted.json"
REFUSED = "refused"
CLAIM = "claim"
CANCEL = "cancel"
ENDED = "ended.json"
RANK_RESULTS = "result.rank*.json"
SLURM_LOG = "slurm.log"
"""Output of the batch step and of Slurm's programs. The job's own output is in job.log."""
_FILES_LAG_S = 10.0
# srun cannot reach the controller, or a node failed. The configuration is not the cause.
_LAUNCH_ERROR = re.compile(
    r"srun: error: (Unable to (confirm allocation|create step)|Task launch for .* "
    r"failed|Application launch failed).*"
)
# Slurm's memory limit (process polling or cgroup) ended a step; its state may be just FAILED.
_OUT_OF_MEMORY = re.compile(
    r"exceeded (\w+ )?memory limit|oom[-_]kill event|task \S+: Out Of Memory", re.IGNORECASE
)
_TIMEOUT_CODES = (124, 137)  # exit codes of `timeout`; 137 after SIGKILL
_HEREDOC_END = "HP_TOOL_FILES"
_UNPACK = (
    "import json, pathlib, sys; "
    "[(pathlib.Path(sys.argv[1]) / name).write_text(text) for name, text in "
    "json.load(sys.stdin).items()]"
)
# The shell ignores SIGTERM so that the supervisor can end the job before the folder is removed.
_ON_NODE = (
    'export PET_NODE_RANK=$SLURM_NODEID; folder=$(mktemp -d -p /tmp) || exit 1; trap "rm -rf '
    '$folder" EXIT; trap : TERM; '
    f'"$1" -c "$2" "$folder" && "$1" "$folder/{streamed.SUPERVISOR}" --attached "$folder"'
)


def claiming_job_id(folder: Path) -> int | None:
    """Return the id of the Slurm job that claimed this folder; None if unclaimed."""
    try:
        text = readback.read_file(folder / CLAIM).decode().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Id of an accepted job, and its submission time in seconds since 1970."""

    job_id: Annotated[int, Interval(ge=0, le=1 << 53)]
    time: Annotated[float, Interval(ge=0.0, le=1e12)]


def read_submission(folder: Path) -> Submission | None:
    """Return the submission record; None if it is missing or was overwritten."""
    return readback.read_json_as(readback.json_adapter(Submission), folder / SUBMITTED)


def state(folder: Path) -> JobState:
    """Return the job's state according to its folder alone, without asking Slurm."""
    if path_exists(folder / ENDED):
        return JobState.CANCELLED if path_exists(folder / CANCEL) else JobState.FINISHED
    return JobState.RUNNING if path_exists(folder / CLAIM) else JobState.QUEUED


def await_files(folder: Path, *, options: SlurmOptions) -> None:
    """Wait for the files of an ended job; a shared file system may show them seconds late."""
    deadline = time.monotonic() + _FILES_LAG_S
    while time.monotonic() < deadline:
        copy_from_logs(folder, options=options)
        try:
            names = os.listdir(folder)  # noqa: PTH208 - makes a network file system refresh
        except (FileNotFoundError, NotADirectoryError):  # Removed by the job.
            return
        if ENDED in names or jobs.RESULT in names:
            return
        time.sleep(0.2)


def ending(folder: Path, *, state: JobState, job: Job | None, timeout_s: float) -> Ending:
    """Return how a job ended: by Slurm's state if Slurm ended it, else by the job's own record."""
    record = readback.read_json(folder / ENDED)
    slurm_state = job.state if job else ""
    wall_s = _wall_s(record) if record else None
    if (
        job is not None
        and job.elapsed_s is not None
        and (wall_s is None or slurm_state not in ("COMPLETED", "FAILED"))
    ):
        wall_s = job.elapsed_s  # If Slurm ended the job, the job's own record is not reliable.
    if wall_s is None:
        wall_s = _logged_duration_s(folder)
    if state is JobState.CANCELLED:
        return Ending(reason="cancelled", wall_s=wall_s)
    if (
        state is JobState.PREEMPTED
        or job_state(slurm_state or "COMPLETED", cancelled_by_us=False) is JobState.PREEMPTED
    ):
        return Ending(
            reason="terminated", wall_s=wall_s, error=f"Slurm ended the job: {slurm_state}"
        )
    if state is JobState.LOST:
        return Ending(
            reason="lost",
            wall_s=wall_s,
            error="Slurm no longer knows the job, and it left no record",
        )
    if path_exists(folder / REFUSED):
        refusal = f"Slurm rejects the job: {readback.log_tail(folder, name=REFUSED)}"
        return Ending(reason="failed_to_start", wall_s=wall_s, error=refusal)
    if slurm_state == "TIMEOUT":
        return Ending(reason="timeout", wall_s=wall_s)
    slurm_log = readback.log_tail(folder, name=SLURM_LOG)
    if slurm_state == "OUT_OF_MEMORY" or _OUT_OF_MEMORY.search(slurm_log):
        return Ending(reason="exited", exit_code=137, oom_kills=1, wall_s=wall_s)
    if not_begun := _LAUNCH_ERROR.search(slurm_log):
        return Ending(reason="terminated", wall_s=wall_s, error=not_begun[0])
    # A script that claimed its job records how it ended, unless Slurm kills it.
    if record is None and path_exists(folder / CLAIM):
        error = "the batch script could not record its end. Is the disk of the runs folder full?"
        return Ending(reason="terminated", wall_s=wall_s, error=error)
    if record is None or not path_exists(folder / jobs.LOG):
        error = f"the batch script ended before the job started: {jobs.last_line(slurm_log)}"
        return Ending(reason="failed_to_start", wall_s=wall_s, error=error)
    if "reason" in record:  # The supervisor wrote the record, which the log contained.
        return parse_ending(record)
    ended = parse_ending(
        {"reason": "exited", "exit_code": record.get("exit_code"), "wall_s": wall_s}
    )
    if ended.exit_code in _TIMEOUT_CODES and wall_s is not None and wall_s >= timeout_s:
        return Ending(reason="timeout", wall_s=wall_s)
    return ended


def _logged_duration_s(folder: Path) -> float | None:
    try:
        began = (folder / CLAIM).lstat().st_mtime
    except OSError:
        return 0.0
    log = folder / jobs.LOG
    return max(log.lstat().st_mtime - began, 0.0) if path_exists(log) else None


def _wall_s(record: Mapping[str, Any]) -> float | None:
    # The job may have overwritten the record.
    with contextlib.suppress(TypeError, ValueError, KeyError):
        wall_s = float(
            record["wall_s"] if "wall_s" in record else record["ended_at"] - record["started_at"]
        )
        return max(wall_s, 0.0) if math.isfinite(wall_s) else None
    return None


def node_log_path(name: str, *, options: Logs, job_name: str) -> str:
    """Return the path of a job's file in the log folder, as seen by the nodes.

    srun replaces `%n` by the node number.
    """
    return f"{options.folder}/{job_name}.{name}"


def render_step(plan: LaunchPlan, *, srun: str, python: str, around: str = "") -> str:
    """Return the batch script lines that run the job on every node.

    srun passes its standard input, one line of JSON, to all nodes. The JSON is ASCII without line
    breaks, so it cannot terminate the here-document.

    Args:
        plan: The job.
        srun: The srun command.
        python: Interpreter on the nodes.
        around: Command prefix that runs it in a container.

    Raises:
        InputError: The files are too large for a batch script.
    """
    payload = json.dumps(streamed.job_files(plan))
    if len(payload) > streamed.MAX_FILES_BYTES:
        limit = f"The limit of a batch script is {streamed.MAX_FILES_BYTES:,}."
        raise InputError(
            f"The job's files have {len(payload):,} bytes. {limit}", field="trainer.command"
        )
    command = shlex.join(("bash", "-c", _ON_NODE, "node", python, _UNPACK))
    return f"{srun} \\\n  {around}{command} << '{_HEREDOC_END}'\n{payload}\n{_HEREDOC_END}"


def copy_claim(folder: Path, *, options: SlurmOptions) -> None:
    """Copy the claim from the log folder to the job folder, once a Slurm job has written it."""
    if options.logs is not None and not path_exists(folder / CLAIM):
        text = readback.log_tail(Path(options.logs.local_path), name=f"{folder.name}.{CLAIM}")
        if text.strip().isdecimal():
            readback.write_text(folder / CLAIM, text)


def copy_from_logs(folder: Path, *, options: SlurmOptions) -> None:
    """Write the files contained in the logs to the job folder, unless the nodes share it."""
    request = jobs.read_submission(folder)
    if options.logs is None or request is None:
        return
    copy_claim(folder, options=options)
    log_folder = Path(options.logs.local_path)
    texts = [
        _read_log(log_folder, f"{folder.name}.{node}.log")
        for node in range(options.num_nodes(num_gpus=request.num_gpus))
    ]
    started = [streamed.parse_output(text) for text in texts if supervisor.MARK[0] in text]
    # Output from nodes that could not start.
    errors = [text for text in texts if supervisor.MARK[0] not in text]
    readback.write_text(
        folder / SLURM_LOG, "".join([*errors, _read_log(log_folder, f"{folder.name}.{SLURM_LOG}")])
    )
    if record := readback.read_json(log_folder / f"{folder.name}.{ENDED}"):
        # Overwritten below if the job left a more detailed record.
        readback.write_json(folder / ENDED, record)
    if not started:
        return
    printed = streamed.join_nodes(started)
    readback.write_text(folder / jobs.LOG, printed.log)
    for name, text in printed.files.items():
        if name == jobs.RESULT or name in request.returns or fnmatchcase(name, RANK_RESULTS):
            readback.write_text(folder / name, text)
    if printed.ended is not None and streamed.job_ending(printed) is not None:
        readback.write_json(folder / ENDED, printed.ended)


def _read_log(folder: Path, name: str) -> str:
    return readback.log_tail(folder, name=name, size_bytes=jobs.MAX_OUTPUT_BYTES)
