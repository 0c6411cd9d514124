"""Jobs of a cluster engine: planned, waiting, and in which state."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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

    @property
    def is_open(self) -> bool:
        """Whether the job has not ended."""
        return self in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why a job waits, in the engine's words."""

    reason: str
    starts_at: str | None = None
    """When the engine expects to start it, as it writes instants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A job, planned but not submitted: pure data, printable, compared in golden tests."""

    job_name: str
    """Stored with the run before its job is submitted, so that a restarted worker finds its jobs by
    it; ends in the run's id, which is random, so that a database restored from a backup, which
    counts runs again, makes no name twice.
    """
    command: tuple[str, ...]
    """argv; never a shell string."""
    environment: Mapping[str, str]
    files: Mapping[str, str]
    """Text files to write into the job's folder before it starts, by name (the request JSON)."""
    num_gpus: int
    timeout_s: float
    excluded_hosts: tuple[str, ...] = ()
    """Nodes that the job is to stay away from, where the engine can be told so."""
    returns: tuple[str, ...] = ()
    """Files that the job may leave in its folder and that output() will be asked for, beside its
    result.
    """
    search: str = ""
    """The search's id, for the site's own books."""
    owner: str = ""
    """Whose search it is, likewise."""
