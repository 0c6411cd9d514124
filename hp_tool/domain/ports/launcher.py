"""Port to a cluster engine. The adapters are in `hp_tool.cluster.launchers`."""

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
    - `submit` is called after the intent is stored. If it is repeated with the same job_name, it
      returns the existing job's handle and starts nothing. If any process cancelled the name before
      or during the submit, no job starts, and its state is CANCELLED.
    - A job that exceeds timeout_s is killed with its process group, and `fetch` reports `timeout`.
    - `fetch` of an ended job always returns a Measurement, whatever happened to the job. Results
      are written under another name and renamed, so a partial result is never read.
    """

    name: str

    def hardware(self) -> Hardware:
        """Return the hardware on which jobs run; num_gpus is the maximum for one job."""

    def answers(self) -> str:
        """Send a request that changes nothing, and return the engine's response as text.

        Raises:
            LauncherError: The engine would not accept a job from this host.
        """

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """Plan a job.

        Raises:
            InputError: The request needs another kind of device, or more devices than one job may
                use.
        """

    def describe(self, plan: LaunchPlan) -> str:
        """Return what submit() would pass to the engine (script, manifest or plan). Pure."""

    def submit(self, plan: LaunchPlan) -> str:
        """Start a job, or find the existing job of this name. Return a handle that stays valid
        across restarts.
        """

    def find(self, job_name: str) -> str | None:
        """Return the handle of a job that any process submitted under this name; None if there is
        none.
        """

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        """Return the states of many jobs in one query.

        Raises:
            LauncherError: The engine has been away for longer than its options allow.
        """

    def cancel(self, job_name: str) -> None:
        """Cancel the job of this name permanently: no later submit can start it.

        Has no effect on ended jobs and unknown names.
        """

    def open_jobs(self) -> list[str]:
        """Return the names of all queued and running jobs, including those that other processes
        submitted.
        """

    def fetch(self, handle: str) -> Measurement:
        """Return the results of an ended job or, if it failed, the cause and the end of its log.

        Raises:
            LauncherError: The job has not ended.
        """

    def output(self, handle: str, *, name: str | None = None) -> str:
        """Return the last megabytes of a job's output, or of its file `name`; empty if it does not
        exist.
        """


@runtime_checkable
class Queueing(Protocol):
    """A launcher that reports why a job waits."""

    def waiting(self, handle: str) -> Waiting | None:
        """Return why a job was queued at the last poll; None if unknown."""


@runtime_checkable
class Timekeeping(Protocol):
    """A launcher whose engine records job times. A late poll then does not count as queueing."""

    def lasted_s(self, handle: str) -> float | None:
        """Return the seconds between submission and end of an ended job; None if unknown."""
