"""Run Slurm's programs. One squeue call covers all jobs.

It runs at most every `poll_s` seconds, and less often after failures.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hp_tool.domain.states import JobState
from hp_tool.errors import EngineAwayError, LauncherError, RefusedError

_COMMAND_LIMIT_S = 20.0
"""Time limit of a command in seconds. It is shorter than a lease, so a coordinator that waits for a
command does not lose its search.
"""
_MAX_BACKOFF_S = 60.0
_SSH = ("ssh", "-oBatchMode=yes", "-oConnectTimeout=10")
_SSH_FAILED = 255
_FORMAT = "%i|%T|%r|%M|%N|%S|%Z"
_UNREACHABLE_ERROR = re.compile(
    r"unable to contact|timed out|connection|not responding|zero bytes|standby|temporarily|try "
    r"again|communication"
    r"|authentication|busy|shutdown",
    re.IGNORECASE,
)
_STATES: dict[JobState, tuple[str, ...]] = {
    JobState.QUEUED: (
        "PENDING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    ),
    # In state COMPLETING, the node may still run processes of the job.
    JobState.RUNNING: (
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
    ),
    JobState.FINISHED: ("COMPLETED", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"),
    JobState.PREEMPTED: (
        "BOOT_FAIL",
        "DEADLINE",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
    ),
    JobState.CANCELLED: ("CANCELLED",),
}
NODE_FAULTS = ("BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL")
"""Job states caused by a failed node."""
_STATE_BY_NAME = {word: state for state, words in _STATES.items() for word in words}

NEVER_STARTS = frozenset(
    (
        *(
            "AccountNotAllowed",
            "AssocMaxWallDurationPerJobLimit",
            "BadConstraints",
            "DependencyNeverSatisfied",
        ),
        *(
            "InvalidAccount",
            "InvalidQOS",
            "JobHoldMaxRequeue",
            "PartitionNodeLimit",
            "PartitionTimeLimit",
        ),
        *("QOSMaxWallDurationPerJobLimit", "QOSNotAllowed"),
    )
)
"""Reasons of pending jobs that can never start."""
_UNKNOWN = ("N/A", "Unknown", "")
_LIMIT_ERROR = re.compile(
    r"MaxSubmit|submit limit|maximum job count|Resource temporarily", re.IGNORECASE
)
"""Error messages of temporary rejections: too many jobs are queued."""
_ALREADY_ENDED_ERROR = re.compile(r"invalid job id|already comple", re.IGNORECASE)


class ControllerUnreachableError(EngineAwayError):
    """The Slurm controller (slurmctld) does not respond.

    Running jobs continue, and its queue is stored on disk.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as reported by Slurm."""

    id: int
    state: str
    """State, as named by Slurm."""
    reason: str = ""
    """Why the job is waiting, or what ended it."""
    elapsed_s: float | None = None
    """Seconds since the job last started."""
    nodes: str = ""
    """Nodes in Slurm's notation, such as n[1-2]."""
    starts_at: str | None = None
    """Actual or expected start time."""
    folder: str = ""
    """Working directory, which identifies the job."""
    cluster: str = ""
    """Cluster in the federation, if reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The host where Slurm's programs run, and the clusters that they query."""

    ssh: str | None = None
    """Login node; None for this host."""
    clusters: tuple[str, ...] = ()
    """Clusters of a federation; empty for the default cluster."""

    @property
    def option(self) -> list[str]:
        """Option that selects the clusters; accepted by all of Slurm's programs."""
        return [f"--clusters={','.join(self.clusters)}"] if self.clusters else []


def controller(*, poll_s: float, site: Site, folder: Path) -> "Controller":
    """Return this process's poller for a site. Processes share its answers through `folder`."""
    return _controller(poll_s, site, folder, os.environ.get("SLURM_CONF"))


@cache
def _controller(poll_s: float, site: Site, folder: Path, configuration: str | None) -> "Controller":
    digest = hashlib.sha256(repr((site, configuration, os.getuid())).encode()).hexdigest()[:12]
    return Controller(poll_s=poll_s, site=site, shared=folder / f"~squeue-{digest}")


class Controller:
    """The queue of this user's jobs, and commands that change it."""

    def __init__(self, *, poll_s: float, site: Site = Site(), shared: Path | None = None) -> None:
        """Poll at most every `poll_s` seconds. `shared` is the file that stores the last answer."""
        self._poll_s, self._site, self._shared = poll_s, site, shared
        self._jobs: tuple[Job, ...] = ()
        self._asked_at = -float("inf")
        """Wall-clock time of the last query, which processes share."""
        self._backoff_s = 0.0
        self._tried_at = -float("inf")
        self._away_since: float | None = None
        self._lock = threading.Lock()

    @property
    def away_s(self) -> float:
        """Seconds since the first failed query; 0 if the last query succeeded."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    @property
    def last_jobs(self) -> tuple[Job, ...]:
        """Jobs in the last answer, which may be old."""
        return self._jobs

    @property
    def asked_at(self) -> float:
        """Time of the last query that was answered, in seconds since 1970."""
        return self._asked_at

    def jobs(self, *, fresh: bool = False) -> tuple[Job, ...]:
        """Return this user's jobs, including ended jobs that Slurm still lists.

        Args:
            fresh: Require an answer to a query that starts after this call. The call may have to
                wait until the next query is allowed.

        Raises:
            ControllerUnreachableError: The controller does not respond.
        """
        since = time.time() if fresh else -float("inf")
        while True:
            with self._lock:
                if self._away_since is not None or not 0 < self._due_s <= self._poll_s:
                    self._refresh()
                if self._asked_at >= since:
                    return self._jobs
                due_s = self._due_s
            time.sleep(min(max(due_s, 0.0), self._poll_s))

    @property
    def _due_s(self) -> float:
        """Seconds until the next query is allowed; negative if it is allowed now."""
        return self._asked_at + self._poll_s - time.time()

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._away_since is not None and now - self._tried_at < self._backoff_s:
            raise ControllerUnreachableError(
                f"The Slurm controller has not responded for {self.away_s:.0f} s."
            )
        self._tried_at = now
        try:
            asked_at, text = self._queue()
        except LauncherError as error:
            self._away_since = self._away_since if self._away_since is not None else now
            self._backoff_s = min(max(2 * self._backoff_s, self._poll_s, 0.5), _MAX_BACKOFF_S)
            raise ControllerUnreachableError(error.message) from error
        self._away_since, self._backoff_s = None, 0.0
        self._jobs, self._asked_at = parse_queue(text), asked_at

    def _queue(self) -> tuple[float, str]:
        """Return the output of squeue and the time of the query.

        Another process may have made the query.
        """
        command = [
            "squeue",
            *self._site.option,
            "--me",
            "--states=all",
            "--noheader",
            f"--format={_FORMAT}",
        ]
        if self._shared is None:
            return time.time(), self._run(command)
        try:
            self._shared.parent.mkdir(parents=True, exist_ok=True)
            file = self._shared.open("a+")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # the folder is not writable or cannot lock: query directly
            return time.time(), self._run(command)
        with file:
            file.seek(0)
            try:
                asked_at, text = json.loads(file.read())
            except ValueError:
                asked_at, text = -float("inf"), ""
            if not 0 <= time.time() - asked_at < self._poll_s:
                asked_at, text = time.time(), self._run(command)
                # Unbuffered, so that closing cannot fail. Errors are ignored because the disk may
                # be full.
                with contextlib.suppress(OSError):
                    os.truncate(file.fileno(), 0)
                    os.write(file.fileno(), json.dumps((asked_at, text)).encode())
            return asked_at, text

    def _run(
        self, command: list[str], *, environment: Mapping[str, str] | None = None, script: str = ""
    ) -> str:
        return _run(command, ssh=self._site.ssh, environment=environment, script=script)

    def submit(self, script: Path, *, environment: Mapping[str, str]) -> int:
        """Submit a script that runs in its own folder with `environment`. Return the job id.

        Raises:
            ControllerUnreachableError: The job must wait, or Slurm accepted it but its answer was
                lost.
            RefusedError: Slurm rejected the job.
        """
        command = ["sbatch", "--parsable", f"--chdir={script.parent}"]
        answer = self._submit_command(command, environment=environment, script=script.read_text())
        # Some sites print a banner first.
        job_id = re.search(r"^(\d+)(;.*)?$", answer, re.MULTILINE)
        if job_id is None:
            raise ControllerUnreachableError(f"sbatch printed no job id: {answer[:200]!r}")
        return int(job_id[1])

    def forecast(self, script: str) -> str:
        """Return Slurm's forecast for a script (`sbatch --test-only`). See `submit` for errors."""
        return self._submit_command(["sbatch", "--test-only"], script=script)

    def _submit_command(
        self, command: list[str], *, environment: Mapping[str, str] | None = None, script: str
    ) -> str:
        """Run a command that submits a script.

        Raise RefusedError if the site rejects it permanently.
        """
        try:
            return self._run(command, environment=environment, script=script)
        except ControllerUnreachableError:
            raise
        except LauncherError as error:
            if _LIMIT_ERROR.search(error.message):
                raise ControllerUnreachableError(error.message) from error
            raise RefusedError(error.message) from error

    def expand_hosts(self, nodes: str) -> tuple[str, ...]:
        """Expand a list such as `n[1-2]` to host names. If this fails, return the list itself."""
        if not nodes or ("[" not in nodes and "," not in nodes):
            return (nodes,) if nodes else ()
        try:
            return tuple(self._run(["scontrol", "show", "hostnames", nodes]).split())
        except LauncherError:
            return (nodes,)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel these jobs. Ended jobs are ignored.

        Raises:
            ControllerUnreachableError: The controller does not respond.
        """
        ids: dict[str, list[str]] = defaultdict(list)
        for job in jobs:
            ids[job.cluster].append(str(job.id))
        for cluster, job_ids in ids.items():
            try:
                self._run(
                    [
                        "scancel",
                        *([f"--clusters={cluster}"] if cluster else self._site.option),
                        *job_ids,
                    ]
                )
            except ControllerUnreachableError:
                raise
            except LauncherError as error:
                if not _ALREADY_ENDED_ERROR.search(error.message):
                    raise

    def accounting_record(self, job_id: int) -> Job | None:
        """Return sacct's record of a job that left the queue.

        Return None if sacct is unavailable or has no record.
        """
        command = ["sacct", *self._site.option, "--noheader", "--parsable2", "--allocations"]
        try:
            text = self._run([*command, "--format=JobIDRaw,State,ElapsedRaw", f"--jobs={job_id}"])
        except LauncherError:  # no accounting, or it does not respond
            return None
        return next((job for job in parse_accounting(text) if job.id == job_id), None)


def client_environment() -> dict[str, str]:
    """Return the environment for Slurm's programs, without variables that change their output."""
    inherited = {
        name: os.environ[name]
        for name in ("HOME", "PATH", "SLURM_CONF", "USER")
        if name in os.environ
    }
    return inherited | {"LC_ALL": "C.UTF-8"}


def parse_queue(text: str) -> tuple[Job, ...]:
    """Parse the output of squeue.

    With several clusters, each cluster's list follows a line `CLUSTER: name`. Unparsable lines are
    ignored, because a folder name may contain a line break.
    """
    jobs: list[Job] = []
    cluster = ""
    for line in text.splitlines():
        if line.startswith("CLUSTER: "):
            cluster = line.removeprefix("CLUSTER: ").strip()
        fields = line.split("|", 6)
        if len(fields) == 7 and fields[0].isdecimal():
            job_id, state, reason, elapsed, nodes, starts_at, folder = fields
            jobs.append(
                Job(
                    id=int(job_id),
                    state=state,
                    reason=reason,
                    elapsed_s=parse_elapsed_s(elapsed),
                    nodes=nodes,
                    starts_at=None if starts_at in _UNKNOWN else starts_at,
                    folder=folder,
                    cluster=cluster,
                )
            )
    return tuple(jobs)


def parse_accounting(text: str) -> tuple[Job, ...]:
    """Parse the output of `sacct` with the columns JobIDRaw, State and ElapsedRaw."""
    fields = [line.split("|") for line in text.splitlines()]
    return tuple(
        Job(id=int(job_id), state=state, elapsed_s=float(elapsed) if elapsed.isdecimal() else None)
        for job_id, state, elapsed in (row for row in fields if len(row) == 3)
        if job_id.isdecimal()
    )


def job_state(word: str, *, cancelled_by_us: bool) -> JobState:
    """Convert a state of squeue or sacct, such as `RUNNING` or `CANCELLED by 1000`.

    If someone else cancelled the job, it counts as preempted. A state that this version does not
    know counts as running until it changes to a known state or the job leaves the queue.
    """
    state = _STATE_BY_NAME.get(word.split(" ", 1)[0].rstrip("+"), JobState.RUNNING)
    return JobState.PREEMPTED if state is JobState.CANCELLED and not cancelled_by_us else state


def parse_elapsed_s(elapsed: str) -> float | None:
    """Convert `1-02:03:04`, `02:03:04` or `3:04` to seconds.

    Return None for other text, such as `INVALID`.
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){1,2}", elapsed):
        return None
    days, _, clock = elapsed.rpartition("-")
    total = 0.0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return 86_400.0 * int(days or 0) + total


def _run(
    command: list[str], *, ssh: str | None, environment: Mapping[str, str] | None, script: str
) -> str:
    """Run a command with `script` as standard input, and return its output.

    Raises:
        ControllerUnreachableError: The controller or the login node did not respond.
        LauncherError: The command failed; the message is its error output.
    """
    base = client_environment()
    if ssh is not None:  # the login node has its own PATH and HOME
        passed = {name: value for name, value in (environment or {}).items() if name not in base}
        words = [
            "env",
            "LC_ALL=C.UTF-8",
            *(f"{name}={value}" for name, value in passed.items()),
            *command,
        ]
        command = [*_SSH, ssh, "--", shlex.join(words)]
        base |= {name: os.environ[name] for name in ("SSH_AUTH_SOCK",) if name in os.environ}
    try:
        done = subprocess.run(
            command,
            env=base if ssh is not None else {**(environment or {}), **base},
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ControllerUnreachableError(
            f"{command[0]} did not respond within {_COMMAND_LIMIT_S:g} s."
        ) from None
    except OSError as error:
        raise LauncherError(f"Cannot run {command[0]}: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout or done.stderr  # sbatch --test-only prints to stderr
    message = " ".join(done.stderr.split())[:500] or f"exit code {done.returncode}"
    connection_failed = ssh is not None and done.returncode == _SSH_FAILED
    raise (
        ControllerUnreachableError
        if connection_failed or _UNREACHABLE_ERROR.search(message)
        else LauncherError
    )(message)
