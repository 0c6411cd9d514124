"""Data retention: run folders on this host, searches with studies, details, measurements."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hp_tool.catalog import library
from hp_tool.catalog.hardware import RUNS_KEY, cluster_runs
from hp_tool.cluster.launchers import folders, jobs
from hp_tool.cluster.launchers.options import SlurmOptions, config_path
from hp_tool.domain.access import AccessStore
from hp_tool.domain.retention import MAX_DAYS, MIN_DAYS, EndedRun, Retention
from hp_tool.domain.units import SECONDS_PER_DAY
from hp_tool.errors import HpToolError, InputError
from hp_tool.loop.search.study import CLAIM
from hp_tool.loop.tuning.study import opened_studies

VARIABLES = {
    "days": "HP_RETENTION_DAYS",
    "search_days": "HP_RETENTION_SEARCH_DAYS",
    "searches": "HP_RETENTION_SEARCHES",
    "folder_days": "HP_RETENTION_FOLDER_DAYS",
    "folders": "HP_RETENTION_FOLDERS",
    "measurement_days": "HP_RETENTION_MEASUREMENT_DAYS",
    "watch_days": "HP_RETENTION_WATCH_DAYS",
}
"""Workers' environment variables, by field of Retention."""


def retention_settings(
    environment: Mapping[str, str] = os.environ, *, days: float | None = None
) -> Retention:
    """Return the retention configured in the environment. `days` overrides HP_RETENTION_DAYS.

    Raises:
        InputError: A variable is malformed. The message contains its name.
    """
    hints: dict[str, Any] = get_type_hints(Retention)
    values: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        if text := environment.get(variable):
            try:
                values[name] = TypeAdapter(hints[name]).validate_python(text)
            except ValidationError as error:
                raise InputError(
                    f"{variable}={text!r}: {error.errors()[0]['msg'].lower()}", field=variable
                ) from None
    if days is not None:
        values["days"] = days
    return validate_retention(Retention(**values), names=VARIABLES)


def validate_retention(retention: Retention, *, names: Mapping[str, str]) -> Retention:
    """Return the retention if its values are within bounds.

    Raises:
        InputError: An age or a number is out of bounds. The message uses its name in `names`.
    """
    for each in fields(retention):
        value = getattr(retention, each.name)
        least, most = (MIN_DAYS, MAX_DAYS) if each.name.endswith("days") else (0, 10**9)
        if value is not None and not least <= value <= most:
            name = names[each.name]
            raise InputError(
                f"{name} is {value:g}; it must be from {least:g} to {most:g}", field=name
            )
    return retention


def retention_words(retention: Retention) -> str:
    """Describe the retention in one phrase: `workers keep searches for 90 days`."""
    if not retention:
        return "nothing deletes them (see `hp-tool db prune`)"
    limits = {
        "details for {:g} days": retention.days,
        "searches for {:g} days": retention.search_days,
        "{:g} searches": retention.searches,
        "run folders for {:g} days": retention.folder_days,
        "{:g} run folders": retention.folders,
        "measurements for {:g} days": retention.measurement_days,
        "silent watched jobs for {:g} days": retention.watch_days,
    }
    return "workers keep " + ", ".join(
        text.format(value) for text, value in limits.items() if value is not None
    )


def run_roots() -> list[Path]:
    """Return the folders in which this host's launchers store runs.

    Invalid entries are skipped; `hp-tool doctor` reports them.
    """
    places: list[Any] = [jobs.default_root()]
    with contextlib.suppress(HpToolError):
        if config_path("slurm").is_file():
            places.append(SlurmOptions.create(None).folder)
    with contextlib.suppress(HpToolError):
        described = (
            cluster_runs(entry.name)
            for entry in library.entries("clusters")
            if RUNS_KEY in entry.fields
        )
        places += [runs.options.get("folder") for runs in described if runs is not None]
    return list(dict.fromkeys(Path(place).resolve() for place in places if place))


def prune(
    *, store: AccessStore, database_url: str, retention: Retention, dry_run: bool = False
) -> dict[str, int]:
    """Delete data beyond the retention, or only count it if `dry_run`. Return the numbers by kind.

    Run folders are deleted before their searches, so an interrupted call can be repeated. A folder
    or search is kept if the run or its search has not ended, if its job is alive, or if it ended
    less than a day ago.
    """
    going = store.old_searches(older_than_days=retention.search_days, keep=retention.searches)
    folder_roots = {name: root for root in run_roots() for name in folders.job_folders(root)}
    ended = store.ended_runs(job_names=folder_roots)
    names = _expired(ended, retention=retention, searches=frozenset(going))
    size_bytes, staying = 0, set()
    for name in names:
        folder_bytes = folders.size_bytes(folder_roots[name] / name)
        if dry_run or folders.remove(folder_roots[name] / name):
            size_bytes += folder_bytes
        else:
            staying.add(name)
    for root in () if dry_run else set(folder_roots.values()):
        folders.remove_leftovers(root)
    going = sorted(set(going) - {ended[name].search_id for name in staying})
    deleted = len(going) if dry_run else store.delete_searches(search_ids=going)
    counted = {
        "searches": deleted,
        "folders": len(names) - len(staying),
        "folder_bytes": size_bytes,
    }
    if going and not dry_run:
        _delete_studies(database_url, frozenset(going))
    if retention.days is not None:
        counted |= store.prune(older_than_days=retention.days, dry_run=dry_run)
    if retention.measurement_days is not None:
        measured = store.prune_measurements(
            older_than_days=retention.measurement_days, dry_run=dry_run
        )
        counted["measurements"] = counted.get("measurements", 0) + measured
    if retention.watch_days is not None:
        counted["watches"] = store.prune_watches(
            older_than_days=retention.watch_days, dry_run=dry_run
        )
    return counted


def _expired(
    ended: Mapping[str, EndedRun], *, retention: Retention, searches: frozenset[str]
) -> list[str]:
    """Return the names of folders to delete.

    These belong to the given searches, are too old, or exceed the maximum number.
    """
    newest_first = sorted(ended, key=lambda name: ended[name].age_s)
    expired = {name for name in ended if ended[name].search_id in searches}
    if retention.folders is not None:
        expired.update(newest_first[retention.folders :])
    if retention.folder_days is not None:
        expired.update(
            name for name in ended if ended[name].age_s > retention.folder_days * SECONDS_PER_DAY
        )
    return sorted(name for name in expired if ended[name].age_s > MIN_DAYS * SECONDS_PER_DAY)


def _delete_studies(database_url: str, searches: frozenset[str]) -> None:
    import optuna

    with opened_studies(database_url) as storage:
        for name in optuna.get_all_study_names(storage):
            if name.partition(CLAIM)[0] in searches:
                optuna.delete_study(study_name=name, storage=storage)
