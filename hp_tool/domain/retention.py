"""How long data of searches is kept."""

from dataclasses import dataclass

MIN_DAYS = 1.0
"""Minimum retention in days: a client may still follow yesterday's search or repeat its request,
and a suspended worker may wake up after a submit.
"""
MAX_DAYS = 36_500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Ages in days and numbers beyond which data is deleted; None: never."""

    days: float | None = None
    """Age of events of ended searches, audit records, idempotency keys and log tails."""
    search_days: float | None = None
    """Age of ended searches with their runs and run folders. Measurements stay."""
    searches: int | None = None
    """Number of the newest ended searches to keep."""
    folder_days: float | None = None
    """Age of folders of ended runs on this host."""
    folders: int | None = None
    """Number of such folders to keep, of the runs that ended last."""
    measurement_days: float | None = None
    """Age of measurements. Calibrations fitted to them stay until the next fit."""
    watch_days: float | None = None
    """Age of the last report of watched jobs."""

    def __bool__(self) -> bool:
        """Return whether anything is ever deleted."""
        return any(getattr(self, name) is not None for name in self.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """An ended run of an ended search."""

    search_id: str
    age_s: float
    """Seconds since it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedData:
    """Data of ended searches that a database stores."""

    ended_searches: int
    oldest_s: float
    """Seconds since the first of them ended; 0 if there are none."""
    database_bytes: int
    """Size of the database in bytes, including Optuna's tables."""
