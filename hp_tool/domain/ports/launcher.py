"""The port to a cluster engine; `hp_tool.cluster.launchers` holds its adapters."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from hp_tool.domain.jobs import JobState, LaunchPlan, Waiting
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.requests import RunRequest


class Launcher(Protocol):
    """A cluster engine.

    Guarantees: `plan` is pure. `submit` is called once the intent is stored; calling it again with
    the same job_name returns the running or finished job's handle and starts nothing. So does a
    submit of a name that was cancelled, before it or in the middle of it, by whatever process: such
    a job is CANCELLED. A job that passes timeout_s is ended with its whole process group and
    fetched as `timeout`. `fetch` on an ended job always answers a Measurement, whatever happened to
    the job; a half-written result is never read (results appear by rename).
    """

    name: str

    def hardware(self) -> Hardware:
        """What jobs would run on; num_gpus is what the engine can give one job."""

    def answers(self) -> str:
        """What the engine says to a harmless question, for people. LauncherError where it would
        take no job from here.
        """

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """InputError if the request is for another device, or for more devices than one job may
        have.
        """

    def describe(self, plan: LaunchPlan) -> str:
        """What submit() would hand to the engine, for people: a script, a manifest, or the plan
        itself. Pure.
        """

    def submit(self, plan: LaunchPlan) -> str:
        """Start the job, or find the one already started under this name; the handle survives a
        restart of the caller.
        """

    def find(self, job_name: str) -> str | None:
        """The handle of a job submitted earlier under this name, by whatever process; None where
        there is none.
        """

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        """States of many jobs in one query. LauncherError once the engine has been away for longer
        than its options allow.
        """

    def cancel(self, job_name: str) -> None:
        """End the job of this name, every process of it, and for good: no submit starts one under
        this name any more.

        Harmless on an ended job, and on one that nobody has submitted yet.
        """

    def open_jobs(self) -> list[str]:
        """Names of the jobs that the engine has queued or running, whichever of our processes
        submitted them.
        """

    def fetch(self, handle: str) -> Measurement:
        """The ended job's numbers or its cause of failure with the end of its log; LauncherError
        while it has not ended.
        """

    def output(self, handle: str, *, name: str | None = None) -> str:
        """The end of what the job has printed, megabytes at most, or of a file that it left in its
        folder; empty where there is none.
        """


@runtime_checkable
class Queueing(Protocol):
    """A launcher whose engine says why a job waits."""

    def waiting(self, handle: str) -> Waiting | None:
        """What it said of a queued job when it was last polled; None if it said nothing."""


@runtime_checkable
class Timekeeping(Protocol):
    """A launcher whose engine keeps the times of its jobs: a late look at one that has ended is
    then no wait for devices.
    """

    def lasted_s(self, handle: str) -> float | None:
        """Seconds from submission to end of an ended job by the engine's clock; None if it does not
        say.
        """
