"""How long what searches leave behind is kept."""

from dataclasses import dataclass

MIN_DAYS = 1.0
"""A client may still follow yesterday's search or repeat its request, and a worker that slept over
a submit may wake.
"""
MAX_DAYS = 36_500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Ages in days and numbers beyond which things are deleted; None: never."""

    days: float | None = None
    """Events of ended searches, audit rows, idempotency keys, ends of logs."""
    search_days: float | None = None
    """Ended searches with their runs and the folders of those. Measurements stay."""
    searches: int | None = None
    """Number of ended searches, the newest ones."""
    folder_days: float | None = None
    """Folders of ended runs on this host."""
    folders: int | None = None
    """Number of such folders, of the runs that ended last."""
    measurement_days: float | None = None
    """Measurements. Calibrations that learnt from them stay, until they are fitted again."""
    watch_days: float | None = None
    """Watched jobs that reported last so long ago."""

    def __bool__(self) -> bool:
        """Whether anything is ever deleted."""
        return any(getattr(self, name) is not None for name in self.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run that ended, of a search that has."""

    search_id: str
    age_s: float
    """Since it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedData:
    """What a database keeps of searches that ended."""

    ended_searches: int
    oldest_s: float
    """Seconds since the first of them ended; 0 where there is none."""
    database_bytes: int
    """Size of the database, Optuna's tables included."""
