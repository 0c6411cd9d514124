"""Host checks for `hp-tool doctor`. Each reported problem comes with a fix."""

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
"""Minimum free space on the database's disk; its write-ahead log alone may use several MiB."""
MANY_SEARCHES = 10_000
"""Warn about missing retention rules above this number of ended searches or run folders."""
CLOCK_TOLERANCE_S = 5.0
"""Tolerated clock difference in seconds. It is a sixth of the lease time, so leases still expire as
intended.
"""
SLURM_TOOLS = ("sbatch", "squeue", "scontrol", "scancel")
PROFILER_PACKAGES = ("torch", "megatron-core")
JOB_NAME = re.compile(r"hp-[0-9a-f]{16}-r[0-9]+-t[0-9]+-[0-9a-f]{16}")
"""Pattern of job names of search runs."""
MAX_NAMES_SHOWN = 3
"""Maximum number of names listed on one line."""


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
    """Check the database, this host and the clusters without changing anything.

    Without the `search` extra, check only the catalogue, the other extras and the launchers'
    programs.

    Args:
        database_url: Database URL; defaults as in `open_store`.
    """
    try:
        require("search", by="A search")
    except (MissingExtraError, UnsupportedError) as error:
        if absent := missing("search"):
            detail, fix = f"{', '.join(absent)} missing", install_command("search")
        else:
            detail, fix = error.message, "use Linux, macOS or WSL"
        detail = f"predictions work, but not {USED_BY['search']}: {detail}"
        return [
            *check_catalogue(),
            Check("extra search", "warning", detail, fix),
            *check_extras(),
            *check_programs(),
        ]
    from hp_tool.cluster.launchers.jobs import default_root

    runs = check_folder("runs folder", default_root(), holds=f"{default_root()} can be written")
    stored = (*check_unknown_jobs(database_url), *check_ended_search_storage(database_url))
    return [
        *check_database(database_url),
        runs,
        *stored,
        *check_catalogue(),
        *check_extras(),
        *check_profiler(),
        *check_programs(),
        *check_clusters(),
    ]


def check_extras() -> Iterator[Check]:
    """Report each missing extra, the features that need it and the command that installs it.

    `search` and `profiler` are not covered: `examine` reports a missing `search`, and
    `check_profiler`, which runs only if `search` is installed, reports a missing `profiler`.
    """
    reported = ("search",) if missing("search") else ("search", "profiler")
    for extra in EXTRAS:
        if extra not in reported and missing(extra):
            detail = f"not installed; needed for {USED_BY[extra]}: {install_command(extra)}"
            yield Check(f"extra {extra}", "ok", detail)


def check_database(url: str | None) -> Iterator[Check]:
    """Check that the database responds, is current and writable, and has a correct clock."""
    from hp_tool.store import database_url, mask_password, schema
    from hp_tool.store.engine import parse_url

    try:
        url = database_url(url)
        name, state = mask_password(url), schema.probe(url)
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
        yield from check_database_state(state)
        return
    yield check_folder(
        "database",
        Path(parse_url(url).database or ""),
        holds=f"{name} will be created on first use",
    )


def check_ended_search_storage(url: str | None) -> Iterator[Check]:
    """Report how much space ended searches and their run folders use, and the retention rules.

    Yield nothing if the database's schema is not current.
    """
    from hp_tool.cluster.launchers import folders
    from hp_tool.loop.tuning.retention import retention_settings, retention_words, run_roots
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
    run_folders = [root / name for root in run_roots() for name in folders.job_folders(root)]
    size_bytes = sum(map(folders.size_bytes, run_folders))
    oldest = (
        f", the oldest {stored.oldest_s / SECONDS_PER_DAY:.0f} days"
        if stored.ended_searches
        else ""
    )
    detail = (
        f"{stored.ended_searches:,} ended search{'' if stored.ended_searches == 1 else 'es'}"
        f"{oldest}; {format_count(len(run_folders), 'run folder')} "
        f"({size_bytes / 2**20:.0f} MiB); database {stored.database_bytes / 2**20:.0f} MiB; "
        f"{retention_words(rules)}"
    )
    if not rules and max(stored.ended_searches, len(run_folders)) > MANY_SEARCHES:
        fix = (
            "try `hp-tool db prune --searches-older-than 90 --dry-run`, or set "
            "HP_RETENTION_SEARCH_DAYS for workers"
        )
        yield Check("retention", "warning", detail, fix)
    else:
        yield Check("retention", "ok", detail)


def check_database_state(state: DatabaseState) -> Iterator[Check]:
    """Check the schema, permissions, disk, webhooks and clock of a reachable database.

    A newer schema is only a warning, because older versions can still use it: a migration first
    adds what the newer version needs, and only a later migration drops what the older version
    needs.
    """
    from hp_tool.store.schema import OLDEST, UPGRADE_PREVIEW

    revision, needed = state.revision, state.needed_revision
    if revision is not None and revision < OLDEST:
        detail = f"the schema is {revision}, from a preview before 0.1.0"
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


def check_folder(name: str, path: Path, *, holds: str) -> Check:
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


def check_unknown_jobs(database_url: str | None) -> Iterator[Check]:
    """Report running jobs and job folders that are missing from the database.

    After a restore from a backup, the database lacks all runs since that backup, and no worker ends
    their jobs.
    """
    from hp_tool import store
    from hp_tool.cluster.launchers.jobs import default_root
    from hp_tool.store import schema

    running_on = {name: _open_jobs(launcher) for name, launcher in _all_launchers()}
    folders = {path.name for path in default_root().glob("hp-*") if JOB_NAME.fullmatch(path.name)}
    try:
        unknown = set(
            schema.unknown_jobs(
                store.database_url(database_url), folders.union(*running_on.values())
            )
        )
    except HpToolError:  # The checks of the database report the error.
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
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more


def _open_jobs(launcher: Callable[[], Launcher]) -> set[str]:
    """Return the names of queued and running search jobs; an empty set if the launcher fails."""
    try:
        return {name for name in launcher().open_jobs() if JOB_NAME.fullmatch(name)}
    except (HpToolError, OSError):
        return set()


def _all_launchers() -> Iterator[tuple[str, Callable[[], Launcher]]]:
    from hp_tool.cluster import launchers

    yield "this host", partial(launchers.create, "local")
    yield from _configured_launchers()


def check_catalogue() -> Iterator[Check]:
    """Report folders in HP_CATALOG_DIR that do not exist."""
    from hp_tool.catalog.library import missing_folders

    for folder in missing_folders():
        fix = "create or mount it, or set another folder in HP_CATALOG_DIR"
        yield Check(
            "catalogue", "warning", f"HP_CATALOG_DIR contains {folder}, which is not a folder", fix
        )


def check_profiler() -> Iterator[Check]:
    """Check the packages and GPUs that local profile runs need."""
    from hp_tool.cluster.launchers.local import detect_hardware

    installed = {
        name: distribution.version
        for name in PROFILER_PACKAGES
        for distribution in importlib.metadata.distributions(name=name)
    }
    not_installed = [name for name in PROFILER_PACKAGES if name not in installed]
    if not_installed:
        detail = (
            f"{' and '.join(not_installed)} missing: predictions and serving benchmarks work, "
            "but no profile runs"
        )
        yield Check("profiler", "warning", detail, install_command("profiler"))
    else:
        yield Check(
            "profiler", "ok", ", ".join(f"{name} {version}" for name, version in installed.items())
        )
    hardware = detect_hardware()
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


def check_programs() -> Iterator[Check]:
    """Check optional programs, which only some launchers and plots need.

    A missing program is never a failure.
    """
    yield check_slurm()
    if shutil.which("kubectl") is None:
        detail = "kubectl is not installed; needed for search.launcher: kubernetes"
        yield Check("kubectl", "ok", f"{detail}: see https://kubernetes.io/docs/tasks/tools/")
    if not missing("plot"):
        from choreographer.browsers.chromium import Chromium

        if Chromium.find_browser(skip_local=False) is None:
            detail = "Chrome is not installed; needed for plots in .png, .svg or .pdf"
            yield Check("chrome", "ok", f"{detail}: plotly_get_chrome")


def check_slurm() -> Check:
    """Check Slurm's client programs and the connection to its controller."""
    absent = [tool for tool in SLURM_TOOLS if not shutil.which(tool)]
    install = "apt-get install slurm-client (Debian, Ubuntu)"
    if len(absent) == len(SLURM_TOOLS):
        detail = "not installed; needed for search.launcher: slurm"
        return Check("slurm", "ok", f"{detail}: {install}")
    if absent:
        return Check("slurm", "warning", f"{', '.join(absent)} missing", install)
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


def check_clusters() -> Iterator[Check]:
    """Check that each configured cluster responds."""
    for name, launcher in _configured_launchers():
        yield _launcher_check(name, launcher)


def _configured_launchers() -> Iterator[tuple[str, Callable[[], Launcher]]]:
    """Yield registered clusters that have a launcher, and launchers that have an options file."""
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
