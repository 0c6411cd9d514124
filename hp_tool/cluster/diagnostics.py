"""Checks of what this host needs, piece by piece: what is wrong, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hp_tool.domain.access import DatabaseState
from hp_tool.domain.units import SECONDS_PER_DAY, counted
from hp_tool.errors import HpToolError, InputError, MissingExtraError, UnsupportedError
from hp_tool.extras import install_command, require

if TYPE_CHECKING:
    from hp_tool.domain.ports import Launcher

LITTLE_DISK_BYTES = 2**30
NO_DISK_BYTES = 16 * 2**20
"""Of a database's disk: its write-ahead log alone may take several MiB."""
MANY = 10_000
"""Ended searches or run folders that are worth a word where nothing ever deletes them."""
CLOCK_TOLERANCE_S = 5.0
"""A sixth of a lease: below it no worker is wrongly taken for dead or alive, and keys expire on
time.
"""
SLURM_TOOLS = ("sbatch", "squeue", "scontrol", "scancel")
PROFILER_PACKAGES = ("torch", "megatron-core")
JOB_NAME = re.compile(r"hp-[0-9a-f]{16}-r[0-9]+-t[0-9]+(-[0-9a-f]{16})?")
"""Of a search's run; those of earlier editions do not end in the run's id."""
SHOWN = 3
"""Names that one line tells."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: Literal["ok", "warning", "failed"]
    """warning: works, but not for everything or not for long."""
    detail: str
    fix: str | None = None
    """How to fix it; None if all is well."""


def examine(*, database_url: str | None = None) -> list[Check]:
    """Every check, of the database at the URL (default: as `open_store`), this host and the
    clusters. Changes nothing.

    An installation without the extra `search` has no database and starts no runs: its check says
    so, and stands for those.
    """
    try:
        require("search", by="a search, which keeps a database and starts runs,")
    except (MissingExtraError, UnsupportedError) as error:
        return [
            *catalogue(),
            Check("searches", "warning", f"this installation answers questions; {error.message}"),
        ]
    from hp_tool.cluster.launchers.jobs import default_root

    runs = folder_check("runs folder", default_root(), holds=f"{default_root()} can be written")
    stored = (*unknown_jobs(database_url), *kept(database_url))
    return [*database(database_url), runs, *stored, *catalogue(), *profiler(), slurm(), *clusters()]


def database(url: str | None) -> Iterator[Check]:
    """Whether the database is reachable, at this version's schema, writable, and its clock ours."""
    from hp_tool.store import database_url, masked, schema
    from hp_tool.store.engine import parse_url

    try:
        url = database_url(url)
        place, state = masked(url), schema.probe(url)
    except HpToolError as error:
        yield Check(
            "database",
            "failed",
            error.message,
            "see that the database runs and that HP_DATABASE_URL names it",
        )
        return
    if state is not None:
        yield Check("database", "ok", f"{place} answers")
        yield from database_state(state)
        return
    yield folder_check(
        "database",
        Path(parse_url(url).database or ""),
        holds=f"{place} will be made at its first use",
    )


def kept(url: str | None) -> Iterator[Check]:
    """What ended searches have left behind, and what deletes it; nothing where the database has
    another version's schema.
    """
    from hp_tool.cluster.launchers import folders
    from hp_tool.loop.tuning.retention import in_words, retention_settings, run_roots
    from hp_tool.store import database_url, schema
    from hp_tool.store.retention import retention_state

    try:
        url = database_url(url)
        stored = schema.read(url, retention_state) if schema.current(url) == schema.HEAD else None
        rules = retention_settings()
    except HpToolError as error:
        if isinstance(error, InputError):
            yield Check("retention", "failed", error.message, f"correct {error.field}")
        return
    if stored is None:
        return
    places = [root / name for root in run_roots() for name in folders.job_folders(root)]
    size_bytes = sum(map(folders.size_bytes, places))
    oldest = (
        f", the oldest {stored.oldest_s / SECONDS_PER_DAY:.0f} days"
        if stored.ended_searches
        else ""
    )
    searches = (
        f"{stored.ended_searches:,} ended "
        f"search{'' if stored.ended_searches == 1 else 'es'}{oldest}"
    )
    on_disk = f"{counted(len(places), 'run folder')} ({size_bytes / 2**20:.0f} MiB)"
    detail = (
        f"{searches}; {on_disk}; database {stored.database_bytes / 2**20:.0f} MiB; "
        f"{in_words(rules)}"
    )
    if not rules and max(stored.ended_searches, len(places)) > MANY:
        fix = (
            "try `hp-tool db prune --searches-older-than 90 --dry-run`, or set "
            "HP_RETENTION_SEARCH_DAYS for workers"
        )
        yield Check("retention", "warning", detail, fix)
    else:
        yield Check("retention", "ok", detail)


def database_state(state: DatabaseState) -> Iterator[Check]:
    """Schema, rights, webhooks and clock of a reachable database. A newer schema only has more:
    migrations expand before they contract.
    """
    revision, needed = state.revision, state.needed_revision
    if revision is None or revision < needed:
        detail = f"the schema is {revision or 'missing'}, this version needs {needed}"
        yield Check("schema", "failed", detail, "run `hp-tool db upgrade`")
    elif revision > needed:
        detail = f"the schema is {revision}, of a newer version than this one, which knows {needed}"
        yield Check("schema", "warning", detail, "update hp-tool on this host too")
    else:
        yield Check("schema", "ok", f"the schema is {revision}")
    if state.read_only:
        fix = "use the primary server, or give this user the right to write the file and its folder"
        yield Check("database writable", "failed", "the database can only be read", fix)
    if state.free_bytes is not None and state.free_bytes < LITTLE_DISK_BYTES:
        status: Literal["warning", "failed"] = (
            "failed" if state.free_bytes < NO_DISK_BYTES else "warning"
        )
        detail = f"{state.free_bytes / 2**20:.0f} MiB are free on the database's disk"
        yield Check("database disk", status, detail, "make room there")
    if state.overdue_webhooks:
        detail = (
            f"{state.overdue_webhooks} webhooks are overdue: no worker with the secret runs, "
            "or none keeps up"
        )
        yield Check(
            "webhooks",
            "warning",
            detail,
            "run workers with the API's HP_WEBHOOK_SECRET or HP_WEBHOOK_SECRET_FILE",
        )
    if abs(state.clock_offset_s) > CLOCK_TOLERANCE_S:
        detail = f"the database's clock is {state.clock_offset_s:+.1f} s from this host's"
        yield Check("clock", "warning", detail, "run NTP on both")
    else:
        yield Check("clock", "ok", f"within {CLOCK_TOLERANCE_S:g} s of the database's")


def folder_check(name: str, path: Path, *, holds: str) -> Check:
    """Whether a file or folder, or the nearest one above it that exists, can be written and has
    room.
    """
    nearest = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    if not os.access(nearest, os.W_OK):
        fix = "give this user the right to write it, or name another (HP_RUNS_DIR, HP_DATABASE_URL)"
        return Check(name, "failed", f"{nearest} cannot be written", fix)
    free = shutil.disk_usage(nearest).free
    if free < LITTLE_DISK_BYTES:
        detail = f"{free / 2**20:.0f} MiB are free at {nearest}"
        return Check(name, "warning", detail, "make room before logs and results fill it")
    return Check(name, "ok", holds)


def unknown_jobs(database_url: str | None) -> Iterator[Check]:
    """Yield the jobs that run and the folders of jobs that the database does not know; nothing
    where it knows all.

    A database that was restored from a backup has forgotten the runs of since then. No worker ends
    their jobs.
    """
    from hp_tool import store
    from hp_tool.cluster.launchers.jobs import default_root
    from hp_tool.store import schema

    running_on = {name: _open_jobs(launcher) for name, launcher in _launchers()}
    folders = {path.name for path in default_root().glob("hp-*") if JOB_NAME.fullmatch(path.name)}
    try:
        unknown = set(
            schema.unknown_jobs(
                store.database_url(database_url), folders.union(*running_on.values())
            )
        )
    except HpToolError:  # which the checks of the database tell
        return
    why = "the database was restored from an older backup, or another one uses {}"
    for name, running in running_on.items():
        if jobs := sorted(unknown & running):
            detail = (
                f"{_some(jobs)} run on {name}, unknown to the database: "
                f"{why.format('this cluster')}"
            )
            fix = (
                "unless they are another database's, end them with the cluster's command (this "
                "host: `touch FOLDER/cancel`)"
            )
            yield Check("unknown jobs", "warning", detail, fix)
    if jobs := sorted(unknown & folders):
        detail = (
            f"{default_root()} has folders of jobs unknown to the database: {_some(jobs)}; "
            f"{why.format('this folder')}"
        )
        yield Check(
            "unknown folders", "warning", detail, "unless they are another database's, delete them"
        )


def _some(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _open_jobs(launcher: Callable[[], Launcher]) -> set[str]:
    """Return the names of searches' jobs that wait or run at an engine; none where it does not
    answer, which others tell.
    """
    try:
        return {name for name in launcher().open_jobs() if JOB_NAME.fullmatch(name)}
    except (HpToolError, OSError):
        return set()


def _launchers() -> Iterator[tuple[str, Callable[[], Launcher]]]:
    """Yield this host, each cluster whose entry says how runs reach it, and each launcher with a
    file of options.
    """
    from hp_tool.cluster import launchers

    yield "this host", partial(launchers.create, "local")
    yield from _engines()


def catalogue() -> Iterator[Check]:
    """Folders of HP_CATALOG_DIR that are not there; nothing where all are."""
    from hp_tool.catalog.library import missing_folders

    for folder in missing_folders():
        fix = "make it or mount it, or name another in HP_CATALOG_DIR"
        yield Check(
            "catalogue", "warning", f"HP_CATALOG_DIR names {folder}, which is no folder", fix
        )


def profiler() -> Iterator[Check]:
    """Whether this host has what its own profile runs need: torch, Megatron Core, and the GPUs they
    would measure.
    """
    from hp_tool.cluster.launchers.local import detect

    installed = {
        name: each.version
        for name in PROFILER_PACKAGES
        for each in importlib.metadata.distributions(name=name)
    }
    missing = [name for name in PROFILER_PACKAGES if name not in installed]
    if missing:
        detail = (
            f"{' and '.join(missing)} missing: this host predicts and serves, but runs no "
            "profile jobs"
        )
        yield Check("profiler", "warning", detail, install_command("profiler"))
    else:
        yield Check(
            "profiler", "ok", ", ".join(f"{name} {version}" for name, version in installed.items())
        )
    hardware = detect()
    if hardware.gpu == "cpu":
        detail = "no NVIDIA GPU is visible: local profile runs measure `cluster.gpu: cpu` only"
        yield Check(
            "gpu",
            "warning",
            detail,
            "run `hp-tool worker` where the GPUs are, or use search.launcher: slurm",
        )
    elif "+cpu" in installed.get("torch", ""):
        detail = (
            f"{hardware.num_gpus} x {hardware.gpu}, but torch {installed['torch']} was built "
            "without CUDA"
        )
        yield Check("gpu", "failed", detail, "install torch from its CUDA wheels")
    else:
        yield Check("gpu", "ok", f"{hardware.num_gpus} x {hardware.gpu} ({hardware.device_name})")


def slurm() -> Check:
    """Whether Slurm's programs are there, all or none, and its controller answers. Only searches on
    Slurm need it, so it never fails.
    """
    missing = [tool for tool in SLURM_TOOLS if not shutil.which(tool)]
    if len(missing) == len(SLURM_TOOLS):
        return Check("slurm", "ok", "not on this host; only search.launcher: slurm needs it")
    if missing:
        detail = f"{', '.join(missing)} missing"
        return Check(
            "slurm", "warning", detail, "install Slurm's client programs (Debian: slurm-client)"
        )
    try:
        done = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, timeout=20, check=False
        )
        answer = (done.stdout or done.stderr).strip().replace("\n", "; ")
        up = done.returncode == 0 and " UP" in answer
    except (OSError, subprocess.TimeoutExpired) as error:
        answer, up = str(error), False
    if up:
        return Check("slurm", "ok", answer)
    return Check("slurm", "warning", answer, "start slurmctld, or set SLURM_CONF to its slurm.conf")


def clusters() -> Iterator[Check]:
    """Whether each cluster whose entry says how runs reach it, and each launcher with a file of
    options, takes runs.
    """
    for name, launcher in _engines():
        yield _launcher_check(name, launcher)


def _engines() -> Iterator[tuple[str, Callable[[], Launcher]]]:
    """Yield each cluster whose entry says how runs reach it, and each launcher with a file of
    options.
    """
    from hp_tool.catalog import library
    from hp_tool.catalog.hardware import RUNS
    from hp_tool.cluster import launchers
    from hp_tool.cluster.launchers.options import config_path
    from hp_tool.loop.tuning.clusters import cluster_launcher

    for entry in library.entries("clusters"):
        if RUNS in entry.fields:
            yield f"cluster {entry.name}", partial(cluster_launcher, entry.name)
    for name in ("slurm", "ray", "kubernetes", "endpoint"):
        if config_path(name).is_file():
            yield name, partial(launchers.create, name)


def _launcher_check(name: str, launcher: Callable[[], Launcher]) -> Check:
    """A launcher that is down now may be up when a run needs it: a warning. A mistake in its
    description fails.
    """
    try:
        return Check(name, "ok", launcher().answers())
    except MissingExtraError as error:
        return Check(
            name, "warning", error.message, "install it where searches on this cluster run"
        )
    except InputError as error:
        return Check(name, "failed", error.message, f"correct {error.field or 'its entry'}")
    except HpToolError as error:
        fix = (
            "see that it runs, that this host reaches it, and that its address and this user's "
            "rights are right"
        )
        return Check(name, "warning", error.message, fix)
