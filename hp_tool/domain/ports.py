"""The ports through which the search reaches the outside: a cluster engine and a store.

Adapters live in `launchers` and `store`; `app` wires them. Every launcher passes one contract test class, so does
every database behind the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from hp_tool.domain.measurement import Hardware, Measurement, ProfileRequest


class JobState(StrEnum):
    """A job as the search sees it, whatever the engine calls it."""

    QUEUED = "queued"
    """Accepted, waiting for devices."""
    RUNNING = "running"
    """Holding devices."""
    FINISHED = "finished"
    """Ended by itself or by its time limit; fetch() tells how."""
    PREEMPTED = "preempted"
    """Taken off by the engine; not the configuration's fault."""
    CANCELLED = "cancelled"
    """Ended on our request."""
    LOST = "lost"
    """The engine no longer knows it and no result exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A job, planned but not submitted: pure data, printable, compared in golden tests."""

    job_name: str
    """Deterministic: the search, the run and the fencing token. A restarted worker finds its jobs by it."""
    command: tuple[str, ...]
    """argv; never a shell string."""
    environment: Mapping[str, str]
    files: Mapping[str, str]
    """Text files to write into the job's folder before it starts, by name (the request JSON)."""
    num_gpus: int
    timeout_s: float


class Launcher(Protocol):
    """A cluster engine.

    Guarantees: `plan` is pure. `submit` is called once the intent is stored; calling it again with the same
    job_name returns the running or finished job's handle and starts nothing. A job that passes timeout_s is ended
    with its whole process group and fetched as `timeout`. `fetch` on an ended job always answers a Measurement,
    whatever happened to the job; a half-written result is never read (results appear by rename).
    """

    name: str

    def hardware(self) -> Hardware:
        """What jobs would run on; num_gpus is what the engine can give one job."""

    def plan(self, request: ProfileRequest, *, job_name: str) -> LaunchPlan: ...

    def submit(self, plan: LaunchPlan) -> str:
        """Start the job, or find the one already started under this name; the handle survives a restart of the caller."""

    def find(self, job_name: str) -> str | None:
        """The handle of a job submitted earlier under this name, by whatever process; None where there is none."""

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        """States of many jobs in one query to the engine."""

    def cancel(self, handle: str) -> None:
        """End the job and every process of it; harmless on an ended job."""

    def fetch(self, handle: str) -> Measurement:
        """The ended job's numbers or its cause of failure with the end of its log."""
