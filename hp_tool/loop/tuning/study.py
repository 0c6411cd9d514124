"""The Optuna study of a search: its projection, its storage, and copying it to a file."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tool.errors import InputError, NotFoundError, StoreError
from hp_tool.loop.calibration import Evidence
from hp_tool.loop.search.account import coverage_runs
from hp_tool.loop.search.sampler import CostModelSampler
from hp_tool.loop.search.study import StudyProjection
from hp_tool.loop.tuning.searched import Searched

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


def study_storage(database_url: str | None) -> BaseStorage:
    """Return Optuna's storage: tables in the database at this URL, or memory.

    Many processes may call this concurrently on a new database.

    Raises:
        StoreError: The database does not respond.
    """
    import optuna

    if database_url is None:
        return optuna.storages.InMemoryStorage()
    from hp_tool.store.engine import BUSY_TIMEOUT_S, POSTGRESQL_OPTIONS, parse_url
    from hp_tool.store.schema import exclusive_access

    url = parse_url(database_url)
    # Like the store's connections, Optuna's wait for locks on SQLite instead of failing.
    if url.get_backend_name() == "sqlite":
        options: dict[str, Any] = {"connect_args": {"timeout": BUSY_TIMEOUT_S}}
    else:
        options = {"connect_args": POSTGRESQL_OPTIONS, "pool_pre_ping": True}
    with exclusive_access(database_url):  # Optuna creates its tables without a lock.
        try:
            return optuna.storages.RDBStorage(
                url.render_as_string(hide_password=False), engine_kwargs=dict(options)
            )
        except Exception as error:  # The driver's error, passed on unchanged.
            raise StoreError(f"Optuna's tables cannot be opened: {type(error).__name__}") from error


@contextmanager
def opened_studies(database_url: str) -> Iterator[BaseStorage]:
    """Open the studies in a database. Close the connections at the end, which Optuna does not do.

    Raises:
        StoreError: The database does not respond.
    """
    storage: Any = study_storage(database_url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def projection_of(
    problem: Searched,
    *,
    evidence: Evidence | None,
    search_id: str,
    storage: BaseStorage,
    claim: int = 1,
    stored: Container[str] = (),
) -> StudyProjection:
    """Return the study of a search. Its sampler uses earlier measurements.

    `stored` contains the digests of configurations whose measurement replaces a run.
    """
    settings = problem.search.settings
    sampler = CostModelSampler(
        table=problem.search.table,
        prior=problem.prior,
        evidence=evidence,
        coverage_runs=coverage_runs(settings, prior=problem.prior),
        seed=settings.seed,
        stored=[
            row
            for row in range(len(problem.search.table))
            if stored and problem.search.digest(row) in stored
        ],
    )
    return StudyProjection(
        search_id=search_id, claim=claim, problem=problem.search, sampler=sampler, storage=storage
    )


def copy_study(*, search_id: str, database_url: str, path: Path) -> None:
    """Copy a search's study from the database at this URL to a SQLite file.

    The file is created if it is missing.

    Raises:
        NotFoundError: The search has no study, because it never ran.
        InputError: The file already contains a study with this name.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a folder", field="--optuna")
    with opened_studies(database_url) as source:
        if search_id not in optuna.get_all_study_names(source):
            raise NotFoundError(
                f"Search {search_id} has no Optuna study here, because none of its runs was "
                "planned.",
                field="search_id",
            )
        try:
            with opened_studies(f"sqlite:///{path.resolve()}") as target:
                optuna.copy_study(from_study_name=search_id, from_storage=source, to_storage=target)
        except optuna.exceptions.DuplicatedStudyError:
            raise InputError(
                f"{path} already contains a study of this search; choose another file",
                field="--optuna",
            ) from None
