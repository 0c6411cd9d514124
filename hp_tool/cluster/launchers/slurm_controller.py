"""The user's jobs as Slurm's own programs report them: one squeue for all jobs of all searches, at
most every `poll_s`, less often while the controller does not answer.
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

from hp_tool.domain.jobs import JobState
from hp_tool.errors import EngineAwayError, LauncherError, RefusedError

_COMMAND_LIMIT_S = 20.0
"""Shorter than a coordinator's lease: it must not lose its search while it waits for an answer."""
_LONGEST_PAUSE_S = 60.0
_SSH = ("ssh", "-oBatchMode=yes", "-oConnectTimeout=10")
_SSH_FAILED = 255
_FORMAT = "%i|%T|%r|%M|%N|%S|%Z"
_AWAY = re.compile(
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
    # During COMPLETING the node may still have processes of the job.
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
"""States of a job that one of its nodes ended."""
_BY_WORD = {word: state for state, words in _STATES.items() for word in words}

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
"""Reasons of a pending job that will never start."""
_UNKNOWN = ("N/A", "Unknown", "")
_CROWDED = re.compile(
    r"MaxSubmit|submit limit|maximum job count|Resource temporarily", re.IGNORECASE
)
"""Refusals that end by waiting: too many jobs are queued already."""
_OVER = re.compile(r"invalid job id|already comple", re.IGNORECASE)


class ControllerAway(EngineAwayError):  # noqa: N818 - a state of the cluster
    """slurmctld does not answer. Running jobs go on, and its queue is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the scheduler knows it."""

    id: int
    state: str
    """As Slurm names it."""
    reason: str = ""
    """Why the job waits, or what ended it."""
    elapsed_s: float | None = None
    """Since its last start."""
    nodes: str = ""
    """As Slurm writes them: n[1-2]."""
    starts_at: str | None = None
    """When it started, or is expected to."""
    folder: str = ""
    """Its working directory, which identifies our jobs."""
    cluster: str = ""
    """Of a federation, where it names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where Slurm's programs are run, and which clusters they are asked about."""

    ssh: str | None = None
    """A login node; None: this host."""
    clusters: tuple[str, ...] = ()
    """Of a federation; none: the default one."""

    @property
    def option(self) -> list[str]:
        """What says so to every program."""
        return [f"--clusters={','.join(self.clusters)}"] if self.clusters else []


def controller(*, poll_s: float, site: Site, folder: Path) -> "Controller":
    """The poller of a site, one in a process. Those of other processes on this host share its
    answers through `folder`.
    """
    return _controller(poll_s, site, folder, os.environ.get("SLURM_CONF"))


@cache
def _controller(poll_s: float, site: Site, folder: Path, configuration: str | None) -> "Controller":
    digest = hashlib.sha256(repr((site, configuration, os.getuid())).encode()).hexdigest()[:12]
    return Controller(poll_s=poll_s, site=site, shared=folder / f"~squeue-{digest}")


class Controller:
    """The queue of this user's jobs, and the orders that can be given to it."""

    def __init__(self, *, poll_s: float, site: Site = Site(), shared: Path | None = None) -> None:
        """poll_s: how old an answer may be before the controller is queried again. `shared`: a file
        for its last answer.
        """
        self._poll_s, self._site, self._shared = poll_s, site, shared
        self._jobs: tuple[Job, ...] = ()
        self._asked_at = -float("inf")
        """By the clock of the wall, which other processes share."""
        self._pause_s = 0.0
        self._tried_at = -float("inf")
        self._away_since: float | None = None
        self._lock = threading.Lock()

    @property
    def away_s(self) -> float:
        """For how long it has not answered; 0 if it answered the last query."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    @property
    def last_jobs(self) -> tuple[Job, ...]:
        """Its last answer, however old."""
        return self._jobs

    @property
    def asked_at(self) -> float:
        """When the last answer was asked for, in seconds since 1970."""
        return self._asked_at

    def jobs(self, *, fresh: bool = False) -> tuple[Job, ...]:
        """This user's jobs, including ended ones that Slurm remembers. Raises ControllerAway.

        `fresh`: as of now or later, which may take until the next query is due.
        """
        since = time.time() if fresh else -float("inf")
        while True:
            with self._lock:
                if self._away_since is not None or not 0 < self._due_s <= self._poll_s:
                    self._ask()
                if self._asked_at >= since:
                    return self._jobs
                due_s = self._due_s
            time.sleep(min(max(due_s, 0.0), self._poll_s))

    @property
    def _due_s(self) -> float:
        """Seconds until the controller may be queried again."""
        return self._asked_at + self._poll_s - time.time()

    def _ask(self) -> None:
        now = time.monotonic()
        if self._away_since is not None and now - self._tried_at < self._pause_s:
            raise ControllerAway(f"the Slurm controller has not answered for {self.away_s:.0f} s")
        self._tried_at = now
        try:
            asked_at, text = self._queue()
        except LauncherError as error:
            self._away_since = self._away_since if self._away_since is not None else now
            self._pause_s = min(max(2 * self._pause_s, self._poll_s, 0.5), _LONGEST_PAUSE_S)
            raise ControllerAway(error.message) from error
        self._away_since, self._pause_s = None, 0.0
        self._jobs, self._asked_at = parse_queue(text), asked_at

    def _queue(self) -> tuple[float, str]:
        """When the queue was asked for, and its text: another process's answer if that is recent
        enough.
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
        except OSError:  # a folder that takes or locks nothing: every process asks for itself
            return time.time(), self._run(command)
        with file:
            file.seek(0)
            try:
                asked_at, text = json.loads(file.read())
            except ValueError:
                asked_at, text = -float("inf"), ""
            if not 0 <= time.time() - asked_at < self._poll_s:
                asked_at, text = time.time(), self._run(command)
                with contextlib.suppress(
                    OSError
                ):  # a full disk; unbuffered, so that closing the file cannot fail either
                    os.truncate(file.fileno(), 0)
                    os.write(file.fileno(), json.dumps((asked_at, text)).encode())
            return asked_at, text

    def _run(
        self, command: list[str], *, environment: Mapping[str, str] | None = None, script: str = ""
    ) -> str:
        return _run(command, ssh=self._site.ssh, environment=environment, script=script)

    def submit(self, script: Path, *, environment: Mapping[str, str]) -> int:
        """Submit a script with `environment`, to run in the script's folder, and return the job's
        id.

        Raises ControllerAway if the job may or may not have been accepted or has to wait,
        RefusedError if it was refused.
        """
        command = ["sbatch", "--parsable", f"--chdir={script.parent}"]
        answer = self._order(command, environment=environment, script=script.read_text())
        job_id = re.search(
            r"^(\d+)(;.*)?$", answer, re.MULTILINE
        )  # a site may print a banner before it
        if job_id is None:
            raise ControllerAway(f"sbatch named no job: {answer[:200]!r}")
        return int(job_id[1])

    def rehearse(self, script: str) -> str:
        """What Slurm says of a script that it is not to run: when and where it would start. Raises
        as `submit` does.
        """
        return self._order(["sbatch", "--test-only"], script=script)

    def _order(
        self, command: list[str], *, environment: Mapping[str, str] | None = None, script: str
    ) -> str:
        """Run an order that the site may refuse, as `_run` does. Raises RefusedError where it
        refuses for good.
        """
        try:
            return self._run(command, environment=environment, script=script)
        except ControllerAway:
            raise
        except LauncherError as error:
            if _CROWDED.search(error.message):
                raise ControllerAway(error.message) from error
            raise RefusedError(error.message) from error

    def hosts(self, nodes: str) -> tuple[str, ...]:
        """The names in `n[1-2]`; the text itself where Slurm does not tell."""
        if not nodes or ("[" not in nodes and "," not in nodes):
            return (nodes,) if nodes else ()
        try:
            return tuple(self._run(["scontrol", "show", "hostnames", nodes]).split())
        except LauncherError:
            return (nodes,)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End these jobs; harmless if they have ended. Raises ControllerAway."""
        ids: dict[str, list[str]] = defaultdict(list)
        for job in jobs:
            ids[job.cluster].append(str(job.id))
        for cluster, those in ids.items():
            try:
                self._run(
                    [
                        "scancel",
                        *([f"--clusters={cluster}"] if cluster else self._site.option),
                        *those,
                    ]
                )
            except ControllerAway:
                raise
            except LauncherError as error:
                if not _OVER.search(error.message):
                    raise

    def accounted(self, job_id: int) -> Job | None:
        """A job that left the queue, from the accounting; None if there is no accounting or it does
        not know the job.
        """
        command = ["sacct", *self._site.option, "--noheader", "--parsable2", "--allocations"]
        try:
            text = self._run([*command, "--format=JobIDRaw,State,ElapsedRaw", f"--jobs={job_id}"])
        except LauncherError:  # there is no accounting, or it does not answer
            return None
        return next((job for job in parse_accounting(text) if job.id == job_id), None)


def client_environment() -> dict[str, str]:
    """The environment of Slurm's programs, without SQUEUE_, SBATCH_ and SLURM_ variables that would
    change what they do.
    """
    inherited = {
        name: os.environ[name]
        for name in ("HOME", "PATH", "SLURM_CONF", "USER")
        if name in os.environ
    }
    return inherited | {"LC_ALL": "C.UTF-8"}


def parse_queue(text: str) -> tuple[Job, ...]:
    """The jobs in squeue's output, of several clusters each under its `CLUSTER: name`.

    Other lines are ignored; a folder's name may contain a line break.
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
                    elapsed_s=seconds(elapsed),
                    nodes=nodes,
                    starts_at=None if starts_at in _UNKNOWN else starts_at,
                    folder=folder,
                    cluster=cluster,
                )
            )
    return tuple(jobs)


def parse_accounting(text: str) -> tuple[Job, ...]:
    """The jobs in sacct's output of JobIDRaw,State,ElapsedRaw."""
    fields = [line.split("|") for line in text.splitlines()]
    return tuple(
        Job(id=int(job_id), state=state, elapsed_s=float(elapsed) if elapsed.isdecimal() else None)
        for job_id, state, elapsed in (each for each in fields if len(each) == 3)
        if job_id.isdecimal()
    )


def job_state(word: str, *, cancelled_by_us: bool) -> JobState:
    """Our state for Slurm's, such as `RUNNING` or sacct's `CANCELLED by 1000`; squeue and sacct use
    the same names.

    A job that somebody else cancelled counts as preempted. A state of a newer Slurm that is not in
    the table counts as running: the job's end then shows as a known state, or as the job leaving
    the queue.
    """
    state = _BY_WORD.get(word.split(" ", 1)[0].rstrip("+"), JobState.RUNNING)
    return JobState.PREEMPTED if state is JobState.CANCELLED and not cancelled_by_us else state


def seconds(elapsed: str) -> float | None:
    """`1-02:03:04`, `02:03:04` or `3:04` in seconds; None for anything else, as `INVALID`."""
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
    """The command's standard output, with `script` on its standard input. Raises ControllerAway or
    LauncherError with its error message.
    """
    own = client_environment()
    if ssh is not None:  # the login node has its own PATH and HOME; a job gets what the plan says
        kept = {name: value for name, value in (environment or {}).items() if name not in own}
        words = [
            "env",
            "LC_ALL=C.UTF-8",
            *(f"{name}={value}" for name, value in kept.items()),
            *command,
        ]
        command = [*_SSH, ssh, "--", shlex.join(words)]
        own |= {name: os.environ[name] for name in ("SSH_AUTH_SOCK",) if name in os.environ}
    try:
        done = subprocess.run(
            command,
            env=own if ssh is not None else {**(environment or {}), **own},
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ControllerAway(f"{command[0]} did not answer within {_COMMAND_LIMIT_S:g} s") from None
    except OSError as error:
        raise LauncherError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout or done.stderr  # sbatch --test-only answers there
    message = " ".join(done.stderr.split())[:500] or f"exit code {done.returncode}"
    lost = ssh is not None and done.returncode == _SSH_FAILED
    raise (ControllerAway if lost or _AWAY.search(message) else LauncherError)(message)
