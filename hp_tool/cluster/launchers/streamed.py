"""Jobs without a shared folder: their files are submitted with them, and they print results."""

import contextlib
import json
import math
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hp_tool.cluster.launchers import jobs, supervisor
from hp_tool.cluster.launchers.jobs import Ending
from hp_tool.cluster.launchers.options import ClusterOptions
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.states import JobState
from hp_tool.errors import InputError, LauncherError

JOB = "job.json"
SUPERVISOR = "supervisor.py"
MAX_FILES_BYTES = 900_000
"""Maximum total size of a job's files in bytes; clusters limit it."""
_LINE = re.compile(
    r"\n?" + re.escape(supervisor.MARK[0]) + r"(.*)" + re.escape(supervisor.MARK[1]) + r"\n?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutput:
    """Parsed output of a job."""

    log: str = ""
    """Output of the job's own processes."""
    files: dict[str, str] = field(default_factory=dict)
    began: float | None = None
    """Time at which the first node started, in seconds since 1970; None if none started."""
    ended: dict[str, Any] | None = None
    """The supervisor's record of how the job ended; None if the supervisor was killed."""
    nodes: int = 0
    """Number of nodes that started."""


class StreamedLauncher(ABC):
    """Base class of launchers whose jobs print their results."""

    name: str

    def __init__(self, options: ClusterOptions) -> None:
        self._cluster = options
        self._jobs: Mapping[str, Any] = {}
        self._listed_at = -float("inf")
        self._away_since: float | None = None

    @abstractmethod
    def _handle(self, job_name: str) -> str: ...

    @abstractmethod
    def _list_jobs(self) -> Mapping[str, Any]:
        """Return the scheduler's records of all jobs, by handle."""

    @abstractmethod
    def _job(self, handle: str) -> Any:
        """Return the scheduler's record of a job; None if there is none.

        Raises:
            LauncherError: The scheduler does not respond.
        """

    @abstractmethod
    def _state(self, job: Any) -> JobState: ...

    @abstractmethod
    def _ending(self, handle: str, job: Any) -> Ending:
        """Return how the job ended by the scheduler's record, for jobs that could not print it."""

    @abstractmethod
    def _request(self, job: Any) -> tuple[int, float]:
        """Return (number of devices, time limit in seconds) of the submitted job."""

    @abstractmethod
    def _texts(self, handle: str) -> Iterable[str]:
        """Return the outputs of all nodes."""

    def hardware(self) -> Hardware:
        return self._cluster.hardware(num_gpus=self._cluster.num_gpus)

    def find(self, job_name: str) -> str | None:
        handle = self._handle(job_name)
        return None if self._job(handle) is None else handle

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        try:
            if time.monotonic() - self._listed_at >= self._cluster.poll_s:
                self._jobs = self._list_jobs()
                self._listed_at = time.monotonic()
            # A missing job may have been submitted after the listing.
            by_handle = {handle: self._jobs.get(handle) or self._job(handle) for handle in handles}
        except LauncherError:
            if (
                self._away_since is not None
                and time.monotonic() - self._away_since > self._cluster.patience_s
            ):
                raise
            return dict.fromkeys(handles, JobState.RUNNING)  # last known state
        return {
            handle: JobState.LOST if job is None else self._state(job)
            for handle, job in by_handle.items()
        }

    def fetch(self, handle: str) -> Measurement:
        job = self._job(handle)
        if job is None:
            raise LauncherError(f"No job {handle} on {self._cluster.name}.")
        if (state := self._state(job)).is_open:
            raise LauncherError(f"Job {handle} is still {state}.")
        num_gpus, timeout_s = self._request(job)
        hardware = self._cluster.hardware(num_gpus=num_gpus)
        printed, ending, nodes = (
            self._printed(handle),
            self._ending(handle, job),
            self._cluster.num_nodes(num_gpus=num_gpus),
        )
        reported = job_ending(printed) or ending
        # The started nodes waited for the others to get devices, so the run did not cause the
        # timeout.
        if reported.reason == "timeout" and 0 < printed.nodes < nodes:
            error = f"too few nodes joined the rendezvous: {printed.nodes} of {nodes} started"
            printed, ending = (
                replace(printed, ended=None),
                replace(reported, reason="terminated", error=error),
            )
        return measure(printed, ending=ending, timeout_s=timeout_s, hardware=hardware)

    def output(self, handle: str, *, name: str | None = None) -> str:
        printed = self._printed(handle)
        return printed.log if name is None else printed.files.get(name, "")

    def _printed(self, handle: str) -> JobOutput:
        return join_nodes([parse_output(text) for text in self._texts(handle)])

    def _set_away(self, away: bool) -> None:
        self._away_since = (self._away_since or time.monotonic()) if away else None


def job_files(plan: LaunchPlan, *, per_node: dict[str, Any] | None = None) -> dict[str, str]:
    """Return all files of the job folder.

    On several nodes, `per_node` adds settings for the driver.
    """
    jobs.check_name(plan.job_name)
    job = {
        "command": list(plan.command),
        "environment": dict(plan.environment),
        "files": sorted(jobs.check_name(name) for name in plan.files),
        "returns": [jobs.check_name(name) for name in plan.returns],
        "timeout_s": plan.timeout_s,
        "num_gpus": plan.num_gpus,
        "max_log_bytes": jobs.max_log_bytes(),
        **(per_node or {}),
    }
    return {**plan.files, JOB: json.dumps(job), SUPERVISOR: Path(supervisor.__file__).read_text()}


def parse_output(text: str) -> JobOutput:
    """Parse one node's output: the log after the first marker, and the results between markers."""
    files: dict[str, str] = {}
    ended = None
    log: list[str] = []
    position, began, began_at = 0, False, None
    for match in _LINE.finditer(text):
        try:
            record = json.loads(match[1])
        except ValueError:  # truncated
            continue
        if not isinstance(record, dict):
            continue
        if began and not files and ended is None:
            log.append(text[position : match.start()])
        position = match.end()
        if "began" in record:
            if not began:  # The supervisor wrote this marker; the job may have written later ones.
                began_at = _finite_number(record["began"])
            began = True
        elif isinstance(record.get("file"), str) and isinstance(record.get("text"), str):
            with contextlib.suppress(InputError):  # invalid file name
                files[jobs.check_name(record["file"])] = record["text"]
        elif isinstance(record.get("ended"), dict):
            ended = record["ended"]
    if began and ended is None and not files:
        log.append(text[position:])
    return JobOutput(
        log="".join(log) if began else text,
        files=files,
        began=began_at,
        ended=ended,
        nodes=int(began),
    )


def _finite_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def join_nodes(nodes: Sequence[JobOutput]) -> JobOutput:
    """Combine the outputs of several nodes.

    The combined record of the end is the one that explains a failure. It is never that of a node
    that succeeded, or of one terminated because another node failed.
    """
    files: dict[str, str] = {}
    for node in reversed(nodes):
        files |= node.files
    ends = [node.ended for node in nodes if node.ended is not None]
    failures = [end for end in ends if end.get("reason") != "exited" or end.get("exit_code")]
    own_failures = [end for end in failures if end.get("reason") != "terminated"]
    ended = next(iter(own_failures or failures or ends), None)
    began = min((node.began for node in nodes if node.began is not None), default=None)
    log, started = "\n".join(node.log for node in nodes), sum(node.nodes for node in nodes)
    return JobOutput(log=log, files=files, began=began, ended=ended, nodes=started)


def split_nodes(text: str) -> list[str]:
    """Split a text at the markers between nodes. Without markers, return it as a single item."""
    marks = [match for match in _LINE.finditer(text) if match[1].startswith('{"node":')]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return (
        [text[mark.end() : end] for mark, end in zip(marks, ends, strict=True)] if marks else [text]
    )


def measure(
    printed: JobOutput, *, ending: Ending, timeout_s: float, hardware: Hardware
) -> Measurement:
    """Return a job's measurement from its output, like `jobs.measure` for a job folder.

    Args:
        printed: Parsed output.
        ending: How the job ended according to the scheduler, for jobs that did not print this.
        timeout_s: Time limit of the run.
        hardware: Hardware of the job.
    """
    with tempfile.TemporaryDirectory(prefix="hp-fetched-") as name:
        folder = Path(name)
        for file, text in {**printed.files, jobs.LOG: printed.log}.items():
            (folder / file).write_text(text)
        return jobs.measure(
            folder, ending=job_ending(printed) or ending, timeout_s=timeout_s, hardware=hardware
        )


def job_ending(printed: JobOutput) -> Ending | None:
    """Return the job's own record of its end; None without one, or if the scheduler ended it."""
    ended = printed.ended
    if ended is None or ended.get("reason") in ("terminated", "cancelled"):
        return None
    return jobs.parse_ending(ended)
