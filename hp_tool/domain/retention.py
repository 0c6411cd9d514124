"""Retention of search data."""

from dataclasses import dataclass

MIN_DAYS = 1.0
"""Minimum retention in days. A client may still follow yesterday's search or repeat its request,
and a suspended worker may resume after submitting a job.
"""
MAX_DAYS = 36_500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Maximum ages in days and maximum numbers of kept items; None: no limit."""

    days: float | None = None
    """Maximum age of events of ended searches, audit records, idempotency keys and log tails."""
    search_days: float | None = None
    """Maximum age of ended searches with their runs and run folders. Measurements are kept."""
    searches: int | None = None
    """Maximum number of ended searches, newest first."""
    folder_days: float | None = None
    """Maximum age of folders of ended runs on this host."""
    folders: int | None = None
    """Maximum number of such folders, those of the most recently ended runs first."""
    measurement_days: float | None = None
    """Maximum age of measurements. Calibrations fitted to them are kept until the next fit."""
    watch_days: float | None = None
    """Maximum age of a watched job's last report."""

    def __bool__(self) -> bool:
        """Return whether anything is ever deleted."""
        return any(getattr(self, name) is not None for name in self.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """An ended run of an ended search."""

    search_id: str
    age_s: float
    """Seconds since the run ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedData:
    """Data of ended searches in a database."""

    ended_searches: int
    oldest_s: float
    """Seconds since the oldest of them ended; 0 if there are none."""
    database_bytes: int
    """Size of the database in bytes, including Optuna's tables."""
