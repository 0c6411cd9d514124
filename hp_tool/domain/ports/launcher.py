"""Port to a cluster engine; `hp_tool.cluster.launchers` has its adapters."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from hp_tool.domain.jobs import LaunchPlan, Waiting
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.states import JobState


class Launcher(Protocol):
    """A cluster engine.

    Guarantees:
    - `plan` is pure.
    - `submit` is called after the intent is stored. Repeated with the same job_name, it returns the
      existing job's handle and starts nothing. The same holds if any process cancelled the name
      before or during the submit; the job is then CANCELLED.
    - A job that exceeds timeout_s is ended with its process group, and fetched as `timeout`.
    - `fetch` of an ended job always returns a Measurement, whatever happened to the job. A
      half-written result is never read, because results appear by rename.
    """

    name: str

    def hardware(self) -> Hardware:
        """Return the hardware that jobs run on; num_gpus is the maximum for one job."""

    def answers(self) -> str:
        """Return the engine's response to a request that changes nothing, as text.

        Raises:
            LauncherError: The engine would not accept a job from here.
        """

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """Plan a job.

        Raises:
            InputError: The request needs another device, or more devices than a job may have.
        """

    def describe(self, plan: LaunchPlan) -> str:
        """Return what submit() would pass to the engine (script, manifest or plan). Pure."""

    def submit(self, plan: LaunchPlan) -> str:
        """Start a job, or find the one of this name; return a handle that survives restarts."""

    def find(self, job_name: str) -> str | None:
        """Return the handle of a job that any process submitted under this name, or None."""

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        """Return the states of many jobs in one query.

        Raises:
            LauncherError: The engine has been away for longer than its options allow.
        """

    def cancel(self, job_name: str) -> None:
        """End the job of this name for good: no later submit starts a job of this name.

        Harmless for ended jobs and for names that were never submitted.
        """

    def open_jobs(self) -> list[str]:
        """Return the names of queued and running jobs, whichever process submitted them."""

    def fetch(self, handle: str) -> Measurement:
        """Return an ended job's results, or the cause of its failure with the end of its log.

        Raises:
            LauncherError: The job has not ended.
        """

    def output(self, handle: str, *, name: str | None = None) -> str:
        """Return the end of a job's output (megabytes), or of its file `name`; empty if missing."""


@runtime_checkable
class Queueing(Protocol):
    """A launcher that reports why a job waits."""

    def waiting(self, handle: str) -> Waiting | None:
        """Return why a job was queued at the last poll; None if unknown."""


@runtime_checkable
class Timekeeping(Protocol):
    """A launcher whose engine records job times, so a late poll does not count as queueing."""

    def lasted_s(self, handle: str) -> float | None:
        """Return the seconds from an ended job's submission to its end; None if unknown."""
