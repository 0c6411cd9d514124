"""Diagnostic checks of this host, each with a fix (`hp-tool doctor`)."""

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
from hp_tool.domain.units import SECONDS_PER_DAY, format_count
from hp_tool.errors import HpToolError, InputError, MissingExtraError, UnsupportedError
from hp_tool.extras import EXTRAS, USED_BY, install_command, missing, require

if TYPE_CHECKING:
    from hp_tool.domain.ports import Launcher

LOW_DISK_BYTES = 2**30
MIN_DISK_BYTES = 16 * 2**20
"""Space that a database's disk needs; its write-ahead log alone may take several MiB."""
MANY_SEARCHES = 10_000
"""Number of ended searches or run folders from which a warning is shown if no retention rule is
set.
"""
CLOCK_TOLERANCE_S = 5.0
"""Tolerated clock difference: a sixth of a lease, so that leases and keys expire as intended."""
SLURM_TOOLS = ("sbatch", "squeue", "scontrol", "scancel")
PROFILER_PACKAGES = ("torch", "megatron-core")
JOB_NAME = re.compile(r"hp-[0-9a-f]{16}-r[0-9]+-t[0-9]+-[0-9a-f]{16}")
"""Job name of a search's run."""
MAX_NAMES_SHOWN = 3
"""Maximum number of names listed in one line."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: Literal["ok", "warning", "failed"]
    """ok, warning (works with limitations) or failed."""
    detail: str
    fix: str | None = None
    """What to do; None if the status is ok."""


def examine(*, database_url: str | None = None) -> list[Check]:
    """Run all checks of the database, this host and the clusters. Changes nothing.

    Without the extra `search`, only the catalogue, the other extras and Slurm are checked.

    Args:
        database_url: The database; default as for `open_store`.
    """
    try:
        require("search", by="Searches")
    except (MissingExtraError, UnsupportedError) as error:
        return [
            *catalogue(),
            Check("searches", "warning", f"Predictions work; searches do not. {error.message}"),
            *extras(),
            slurm(),
        ]
    from hp_tool.cluster.launchers.jobs import default_root

    runs = folder_check("runs folder", default_root(), holds=f"{default_root()} can be written")
    stored = (*unknown_jobs(database_url), *kept(database_url))
    return [
        *database(database_url),
        runs,
        *stored,
        *catalogue(),
        *extras(),
        *profiler(),
        slurm(),
        *clusters(),
    ]


def extras() -> Iterator[Check]:
    """Check the optional extras: name each missing extra, what needs it and the command that
    installs it.

    A missing extra is not a failure. The extra `search` has a separate check, and so has `profiler`
    once it is installed.
    """
    reported = ("search",) if missing("search") else ("search", "profiler")
    for extra in EXTRAS:
        if extra not in reported and missing(extra):
            detail = f"not installed; needed for {USED_BY[extra]}: {install_command(extra)}"
            yield Check(f"extra {extra}", "ok", detail)


def database(url: str | None) -> Iterator[Check]:
    """Check that the database is reachable, current and writable, and that its clock is correct."""
    from hp_tool.store import database_url, masked, schema
    from hp_tool.store.engine import parse_url

    try:
        url = database_url(url)
        name, state = masked(url), schema.probe(url)
    except HpToolError as error:
        yield Check(
            "database",
            "failed",
            error.message,
            "check that the database runs and that HP_DATABASE_URL is correct",
        )
        return
    if state is not None:
        yield Check("database", "ok", f"{name} responds")
        yield from database_state(state)
        return
    yield folder_check(
        "database",
        Path(parse_url(url).database or ""),
        holds=f"{name} will be created on first use",
    )


def kept(url: str | None) -> Iterator[Check]:
    """Report stored data of ended searches and the retention rules.

    Yields nothing if the database's schema is not current.
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
    on_disk = f"{format_count(len(places), 'run folder')} ({size_bytes / 2**20:.0f} MiB)"
    detail = (
        f"{searches}; {on_disk}; database {stored.database_bytes / 2**20:.0f} MiB; "
        f"{in_words(rules)}"
    )
    if not rules and max(stored.ended_searches, len(places)) > MANY_SEARCHES:
        fix = (
            "try `hp-tool db prune --searches-older-than 90 --dry-run`, or set "
            "HP_RETENTION_SEARCH_DAYS for workers"
        )
        yield Check("retention", "warning", detail, fix)
    else:
        yield Check("retention", "ok", detail)


def database_state(state: DatabaseState) -> Iterator[Check]:
    """Check schema, permissions, disk, webhooks and clock of a reachable database.

    A newer schema is only a warning, because migrations expand before they contract.
    """
    from hp_tool.store.schema import OLDEST, UPGRADE_PREVIEW

    revision, needed = state.revision, state.needed_revision
    if revision is not None and revision < OLDEST:
        detail = f"the schema is {revision}, of a preview before 0.1.0"
        yield Check("schema", "failed", detail, UPGRADE_PREVIEW)
    elif revision is None or revision < needed:
        detail = f"the schema is {revision or 'missing'}; this version needs {needed}"
        yield Check("schema", "failed", detail, "run `hp-tool db upgrade`")
    elif revision > needed:
        detail = f"the schema is {revision}, newer than this version supports ({needed})"
        yield Check("schema", "warning", detail, "update hp-tool on this host")
    else:
        yield Check("schema", "ok", f"the schema is {revision}")
    if state.read_only:
        fix = "use the primary server, or give this user write access to the file and its folder"
        yield Check("database writable", "failed", "the database is read-only", fix)
    if state.free_bytes is not None and state.free_bytes < LOW_DISK_BYTES:
        status: Literal["warning", "failed"] = (
            "failed" if state.free_bytes < MIN_DISK_BYTES else "warning"
        )
        detail = f"{state.free_bytes / 2**20:.0f} MiB free on the database's disk"
        yield Check("database disk", status, detail, "free some space")
    if state.overdue_webhooks:
        detail = (
            f"{state.overdue_webhooks} webhooks are overdue: no worker with the secret runs, "
            "or the workers are overloaded"
        )
        yield Check(
            "webhooks",
            "warning",
            detail,
            "run workers with the API's HP_WEBHOOK_SECRET or HP_WEBHOOK_SECRET_FILE",
        )
    if abs(state.clock_offset_s) > CLOCK_TOLERANCE_S:
        detail = f"the database's clock differs by {state.clock_offset_s:+.1f} s from this host's"
        yield Check("clock", "warning", detail, "run NTP on both")
    else:
        yield Check("clock", "ok", f"within {CLOCK_TOLERANCE_S:g} s of the database's clock")


def folder_check(name: str, path: Path, *, holds: str) -> Check:
    """Check that a path, or its nearest existing parent, is writable and has free space."""
    nearest = next((at for at in (path, *path.absolute().parents) if at.exists()), Path("/"))
    if not os.access(nearest, os.W_OK):
        fix = "give this user write access, or set another path (HP_RUNS_DIR, HP_DATABASE_URL)"
        return Check(name, "failed", f"{nearest} is not writable", fix)
    free = shutil.disk_usage(nearest).free
    if free < LOW_DISK_BYTES:
        detail = f"{free / 2**20:.0f} MiB free at {nearest}"
        return Check(name, "warning", detail, "free some space before logs and results fill it")
    return Check(name, "ok", holds)


def unknown_jobs(database_url: str | None) -> Iterator[Check]:
    """Report running jobs and job folders that the database does not know.

    A database restored from a backup has lost later runs, and no worker ends their jobs.
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
    except HpToolError:  # Reported by the checks of the database.
        return
    cause = "the database was restored from an older backup, or another one uses {}"
    for name, running in running_on.items():
        if jobs := sorted(unknown & running):
            detail = (
                f"{_first_names(jobs)} run on {name} but are not in the database: "
                f"{cause.format('this cluster')}"
            )
            fix = (
                "unless they belong to another database, cancel them with the cluster's command "
                "(this host: `touch FOLDER/cancel`)"
            )
            yield Check("unknown jobs", "warning", detail, fix)
    if jobs := sorted(unknown & folders):
        detail = (
            f"{default_root()} has job folders that are not in the database: {_first_names(jobs)}; "
            f"{cause.format('this folder')}"
        )
        yield Check(
            "unknown folders",
            "warning",
            detail,
            "unless they belong to another database, delete them",
        )


def _first_names(names: list[str]) -> str:
    """Return the first few names and the number of others."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more


def _open_jobs(launcher: Callable[[], Launcher]) -> set[str]:
    """Return the names of searches' open jobs; none if the engine does not respond."""
    try:
        return {name for name in launcher().open_jobs() if JOB_NAME.fullmatch(name)}
    except (HpToolError, OSError):
        return set()


def _launchers() -> Iterator[tuple[str, Callable[[], Launcher]]]:
    """Yield this host, registered clusters with a launcher, and launchers with an options file."""
    from hp_tool.cluster import launchers

    yield "this host", partial(launchers.create, "local")
    yield from _engines()


def catalogue() -> Iterator[Check]:
    """Report missing folders of HP_CATALOG_DIR."""
    from hp_tool.catalog.library import missing_folders

    for folder in missing_folders():
        fix = "create or mount it, or set another folder in HP_CATALOG_DIR"
        yield Check(
            "catalogue", "warning", f"HP_CATALOG_DIR contains {folder}, which is not a folder", fix
        )


def profiler() -> Iterator[Check]:
    """Check for the packages and GPUs that local profile runs need."""
    from hp_tool.cluster.launchers.local import detect

    installed = {
        name: distribution.version
        for name in PROFILER_PACKAGES
        for distribution in importlib.metadata.distributions(name=name)
        for each in importlib.metadata.distributions(name=name)
    }
    missing = [name for name in PROFILER_PACKAGES if name not in installed]
    if missing:
        detail = (
            f"{' and '.join(missing)} missing: predictions and serving benchmarks work, but no "
            "profile runs"
        )
        yield Check("profiler", "warning", detail, install_command("profiler"))
    else:
        yield Check(
            "profiler", "ok", ", ".join(f"{name} {version}" for name, version in installed.items())
        )
    hardware = detect()
    if hardware.gpu == "cpu":
        detail = "no NVIDIA GPU found: local profile runs only measure `cluster.gpu: cpu`"
        yield Check(
            "gpu",
            "warning",
            detail,
            "run `hp-tool worker` on a host with GPUs, or use search.launcher: slurm",
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
    """Check Slurm's programs and controller; only searches on Slurm need them, so never failed."""
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
    """Check that each configured cluster accepts runs."""
    for name, launcher in _engines():
        yield _launcher_check(name, launcher)


def _engines() -> Iterator[tuple[str, Callable[[], Launcher]]]:
    """Yield registered clusters with a launcher, and launchers with an options file."""
    from hp_tool.catalog import library
    from hp_tool.catalog.hardware import RUNS_KEY
    from hp_tool.cluster import launchers
    from hp_tool.cluster.launchers.options import config_path
    from hp_tool.loop.tuning.clusters import cluster_launcher

    for entry in library.entries("clusters"):
        if RUNS_KEY in entry.fields:
            yield f"cluster {entry.name}", partial(cluster_launcher, entry.name)
    for name in ("slurm", "ray", "kubernetes", "endpoint"):
        if config_path(name).is_file():
            yield name, partial(launchers.create, name)


def _launcher_check(name: str, launcher: Callable[[], Launcher]) -> Check:
    """Check a launcher: unreachable is a warning, an invalid configuration a failure."""
    try:
        return Check(name, "ok", launcher().answers())
    except MissingExtraError as error:
        return Check(
            name, "warning", error.message, "install it on hosts that search on this cluster"
        )
    except InputError as error:
        return Check(name, "failed", error.message, f"correct {error.field or 'its entry'}")
    except HpToolError as error:
        fix = (
            "check that it runs, that this host can reach its address, and this user's permissions"
        )
        return Check(name, "warning", error.message, fix)
