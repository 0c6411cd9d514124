"""Jobs of a cluster engine: launch plans, and reasons for waiting."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The engine's reason why a job waits."""

    reason: str
    starts_at: str | None = None
    """Expected start, in the engine's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A planned job, as pure, printable data that golden tests compare."""

    job_name: str
    """Name of the job. It is stored with the run before submission, so that a restarted worker
    finds its jobs. It ends with the random run id, because a database restored from a backup reuses
    run numbers.
    """
    command: tuple[str, ...]
    """argv; never a shell string."""
    environment: Mapping[str, str]
    files: Mapping[str, str]
    """Contents of files to write into the job's folder before it starts, by name."""
    num_gpus: int
    timeout_s: float
    excluded_hosts: tuple[str, ...] = ()
    """Nodes to avoid, if the engine supports it."""
    returns: tuple[str, ...] = ()
    """Files that the job may write into its folder besides its result, for output()."""
    search: str = ""
    """Search id, for the site's accounting."""
    owner: str = ""
    """Owner of the search, for the site's accounting."""
