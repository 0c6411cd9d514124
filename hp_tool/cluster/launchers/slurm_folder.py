"""The folder of a Slurm job: its state by the files in it, with or without the controller.

The folder, which is the job's working directory, identifies the job: any process with the folder
finds the job in the queue, even if the process that submitted it is gone.

    job.json         the job to submit; from here on the job exists for us
    attempted        a submission was started; its answer may have been lost
    submitted.json   the controller accepted it, under this id
    refused          Slurm will not run it, for this reason
    claim            written by the job when it starts: of two submissions for one folder, only the job with this id runs
    cancel           written by a launcher, perhaps before the job is submitted: end the job, or never start it
    ended.json       written by the job when it ends

Where the nodes do not share the folder, a job's files travel in its batch script, and its results
are read from its logs. Slurm writes a job's output on the job's nodes, so one folder of theirs must
be readable here. For each job it has

    NAME.claim        the id of the Slurm job that runs under this name
    NAME.ended.json   how the batch step ended
    NAME.slurm.log    output of the batch step and of Slurm's programs
    NAME.<n>.log      output of the n-th node: the job's log, its results and how it ended (`streamed`)

`bring` writes these into the job's folder here, as a job with a shared folder would have done.
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
from hp_tool.cluster.launchers.jobs import Ending, recorded
from hp_tool.cluster.launchers.options import Logs, SlurmOptions
from hp_tool.cluster.launchers.readback import is_there
from hp_tool.cluster.launchers.slurm_controller import Job, job_state
from hp_tool.domain.jobs import JobState, LaunchPlan
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
"""Output of the batch step itself and of Slurm's programs; the job's own output is in job.log."""
_FILES_LAG_S = 10.0
# The controller did not answer srun, or a node failed: not the configuration's fault.
_NOT_BEGUN = re.compile(
    r"srun: error: (Unable to (confirm allocation|create step)|Task launch for .* "
    r"failed|Application launch failed).*"
)
# Slurm held a step to its memory, by counting its processes or by control groups; the job's state
# may say no more than FAILED.
_OUT_OF_MEMORY = re.compile(
    r"exceeded (\w+ )?memory limit|oom[-_]kill event|task \S+: Out Of Memory", re.IGNORECASE
)
_TIMEOUT_CODES = (124, 137)  # timeout's own, and where it had to kill
_END = "HP_TOOL_FILES"
_UNPACK = (
    "import json, pathlib, sys; "
    "[(pathlib.Path(sys.argv[1]) / name).write_text(text) for name, text in "
    "json.load(sys.stdin).items()]"
)
# The shell ignores TERM and leaves it to the supervisor, which ends the job's processes before the
# folder is removed.
_ON_NODE = (
    'export PET_NODE_RANK=$SLURM_NODEID; folder=$(mktemp -d -p /tmp) || exit 1; trap "rm -rf '
    '$folder" EXIT; trap : TERM; '
    f'"$1" -c "$2" "$folder" && "$1" "$folder/{streamed.SUPERVISOR}" --attached "$folder"'
)


def claimed_by(folder: Path) -> int | None:
    """The id of the Slurm job that runs or ran in this folder."""
    try:
        text = readback.read_file(folder / CLAIM).decode().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What the controller was handed, and when (seconds since 1970)."""

    job_id: Annotated[int, Interval(ge=0, le=1 << 53)]
    time: Annotated[float, Interval(ge=0.0, le=1e12)]


def handed_over(folder: Path) -> Submission | None:
    """Return the record of the submission; None where there is none, or the job wrote over it."""
    return readback.read_as(readback.typed(Submission), folder / SUBMITTED)


def state(folder: Path) -> JobState:
    """The state of the job by its folder alone."""
    if is_there(folder / ENDED):
        return JobState.CANCELLED if is_there(folder / CANCEL) else JobState.FINISHED
    return JobState.RUNNING if is_there(folder / CLAIM) else JobState.QUEUED


def await_files(folder: Path, *, options: SlurmOptions) -> None:
    """Wait for the files of an ended job: a shared file system may lag seconds behind the
    scheduler.
    """
    deadline = time.monotonic() + _FILES_LAG_S
    while time.monotonic() < deadline:
        bring(folder, options=options)
        try:
            names = os.listdir(folder)  # noqa: PTH208 - opening the folder makes a network file system look again
        except (FileNotFoundError, NotADirectoryError):  # the job's own doing
            return
        if ENDED in names or jobs.RESULT in names:
            return
        time.sleep(0.2)


def ending(folder: Path, *, state: JobState, job: Job | None, timeout_s: float) -> Ending:
    """How a job ended: by Slurm's state if Slurm ended it, else by the job's own record."""
    record = readback.read_json(folder / ENDED)
    slurm_state = job.state if job else ""
    wall_s = _wall_s(record) if record else None
    if (
        job is not None
        and job.elapsed_s is not None
        and (wall_s is None or slurm_state not in ("COMPLETED", "FAILED"))
    ):
        wall_s = (
            job.elapsed_s
        )  # where Slurm ended the job, a record of its end may be the job's own
    if wall_s is None:
        wall_s = _signs_of_life_s(folder)
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
            error="Slurm no longer knows the job, and it left no record of its end",
        )
    if is_there(folder / REFUSED):
        refusal = f"Slurm will not run the job: {readback.log_tail(folder, name=REFUSED)}"
        return Ending(reason="failed_to_start", wall_s=wall_s, error=refusal)
    if slurm_state == "TIMEOUT":
        return Ending(reason="timeout", wall_s=wall_s)
    slurm_log = readback.log_tail(folder, name=SLURM_LOG)
    if slurm_state == "OUT_OF_MEMORY" or _OUT_OF_MEMORY.search(slurm_log):
        return Ending(reason="exited", exit_code=137, oom_kills=1, wall_s=wall_s)
    if not_begun := _NOT_BEGUN.search(slurm_log):
        return Ending(reason="terminated", wall_s=wall_s, error=not_begun[0])
    if record is None and is_there(
        folder / CLAIM
    ):  # a script that took the job records its end, and Slurm did not end it
        error = "the batch script could not record its end: is the disk of the runs folder full?"
        return Ending(reason="terminated", wall_s=wall_s, error=error)
    if record is None or not is_there(folder / jobs.LOG):
        error = f"the batch script ended before the job started: {jobs.last_line(slurm_log)}"
        return Ending(reason="failed_to_start", wall_s=wall_s, error=error)
    if "reason" in record:  # written by the supervisor, through the log
        return recorded(record)
    ended = recorded({"reason": "exited", "exit_code": record.get("exit_code"), "wall_s": wall_s})
    if ended.exit_code in _TIMEOUT_CODES and wall_s is not None and wall_s >= timeout_s:
        return Ending(reason="timeout", wall_s=wall_s)
    return ended


def _signs_of_life_s(folder: Path) -> float | None:
    """Seconds from the job's start to the last line of its log, where nobody kept its time; 0 of
    one that never started.
    """
    try:
        began = (folder / CLAIM).lstat().st_mtime
    except OSError:
        return 0.0
    log = folder / jobs.LOG
    return max(log.lstat().st_mtime - began, 0.0) if is_there(log) else None


def _wall_s(record: Mapping[str, Any]) -> float | None:
    with contextlib.suppress(TypeError, ValueError, KeyError):  # the job may have written over it
        wall_s = float(
            record["wall_s"] if "wall_s" in record else record["ended_at"] - record["started_at"]
        )
        return max(wall_s, 0.0) if math.isfinite(wall_s) else None
    return None


def path_of(name: str, *, options: Logs, job_name: str) -> str:
    """The path, on the nodes, of a job's file in the folder of logs; srun replaces `%n` in it by a
    node's number.
    """
    return f"{options.folder}/{job_name}.{name}"


def step(plan: LaunchPlan, *, srun: str, python: str, around: str = "") -> str:
    """The lines of the batch script that run the job on every node, `around` being the words of a
    container.

    srun passes its input, one line of JSON, to all nodes; ASCII without a line break cannot end the
    here-document. Raises InputError for files that are too large for a batch script.
    """
    payload = json.dumps(streamed.job_files(plan))
    if len(payload) > streamed.MAX_FILES_BYTES:
        limit = f"a batch script should carry at most {streamed.MAX_FILES_BYTES:,}"
        raise InputError(
            f"the job's files have {len(payload):,} bytes; {limit}", field="trainer.command"
        )
    command = shlex.join(("bash", "-c", _ON_NODE, "node", python, _UNPACK))
    return f"{srun} \\\n  {around}{command} << '{_END}'\n{payload}\n{_END}"


def bring_claim(folder: Path, *, options: SlurmOptions) -> None:
    """Write into the job's folder which Slurm job runs it, once one does."""
    if options.logs is not None and not is_there(folder / CLAIM):
        text = readback.log_tail(Path(options.logs.seen_here), name=f"{folder.name}.{CLAIM}")
        if text.strip().isdecimal():
            readback.write_text(folder / CLAIM, text)


def bring(folder: Path, *, options: SlurmOptions) -> None:
    """Write into the job's folder what its logs contain by now; does nothing if the nodes share the
    folder.
    """
    request = jobs.submitted(folder)
    if options.logs is None or request is None:
        return
    bring_claim(folder, options=options)
    far = Path(options.logs.seen_here)
    texts = [
        _read(far, f"{folder.name}.{node}.log")
        for node in range(options.num_nodes(num_gpus=request.num_gpus))
    ]
    started = [streamed.parse(text) for text in texts if supervisor.MARK[0] in text]
    errors = [
        text for text in texts if supervisor.MARK[0] not in text
    ]  # why a node could not start
    readback.write_text(
        folder / SLURM_LOG, "".join([*errors, _read(far, f"{folder.name}.{SLURM_LOG}")])
    )
    if record := readback.read_json(far / f"{folder.name}.{ENDED}"):
        readback.write_json(
            folder / ENDED, record
        )  # replaced below by the job's own record, which says more
    if not started:
        return
    printed = streamed.join(started)
    readback.write_text(folder / jobs.LOG, printed.log)
    for name, text in printed.files.items():
        if name == jobs.RESULT or name in request.returns or fnmatchcase(name, RANK_RESULTS):
            readback.write_text(folder / name, text)
    if printed.ended is not None and streamed.own_ending(printed) is not None:
        readback.write_json(folder / ENDED, printed.ended)


def _read(folder: Path, name: str) -> str:
    return readback.log_tail(folder, name=name, size_bytes=jobs.MAX_OUTPUT_BYTES)
