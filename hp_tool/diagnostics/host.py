"""Whether this host can do its part, checked piece by piece, each trouble with its mend."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hp_tool.domain.access import DatabaseState
from hp_tool.errors import HpToolError

LITTLE_DISK_BYTES = 2**30
CLOCK_TOLERANCE_S = 5.0
"""A sixth of a lease: below it no worker is thought dead or alive wrongly, and no key expires at a wrong moment to speak of."""
SLURM_TOOLS = ("sbatch", "squeue", "scontrol", "scancel")
PROFILER_PACKAGES = ("torch", "megatron-core")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warning", "failed"]
    """warning: works, but not for everything or not for long."""
    detail: str
    mend: str | None = None
    """What to do about it; None where all is well."""


def examine(*, database_url: str | None = None) -> list[Check]:
    """Every check, of the database at the URL (default: as `open_store`) and of this host. Changes nothing."""
    return [*database(database_url), runs_folder(), *profiler(), slurm()]


def database(url: str | None) -> Iterator[Check]:
    """Reachable, at this version's schema, writable, its clock ours."""
    from hp_tool.store import schema
    from hp_tool.store.engine import database_url, masked, parse_url

    try:
        url = database_url(url)
        place, state = masked(url), schema.probe(url)
    except HpToolError as error:
        mend = "see that the database runs and that HP_DATABASE_URL names it"
        yield Check(name="database", status="failed", detail=error.message, mend=mend)
        return
    if state is not None:
        yield Check(name="database", status="ok", detail=f"{place} answers")
        yield from database_state(state)
        return
    yield folder_check("database", Path(parse_url(url).database or ""), holds=f"{place} will be made at its first use")


def database_state(state: DatabaseState) -> Iterator[Check]:
    """What is told of a database that answers. A newer schema only has more: migrations expand before they contract."""
    found, needed = state.revision, state.needed_revision
    if found is None or found < needed:
        detail = f"the schema is {found or 'missing'}, this version needs {needed}"
        yield Check(name="schema", status="failed", detail=detail, mend="run `hp-tool db upgrade`")
    elif found > needed:
        detail = f"the schema is {found}, of a newer version than this one, which knows {needed}"
        yield Check(name="schema", status="warning", detail=detail, mend="update hp-tool on this host too")
    else:
        yield Check(name="schema", status="ok", detail=f"the schema is {found}")
    if state.read_only:
        mend = "use the primary server, or give this user the right to write the file and its folder"
        yield Check(name="database writable", status="failed", detail="the database can only be read", mend=mend)
    if state.overdue_webhooks:
        detail = f"{state.overdue_webhooks} ends of searches wait to be told: no worker with the secret runs, or none keeps up"
        mend = "run workers with the API's HP_WEBHOOK_SECRET or HP_WEBHOOK_SECRET_FILE"
        yield Check(name="webhooks", status="warning", detail=detail, mend=mend)
    if abs(state.clock_offset_s) > CLOCK_TOLERANCE_S:
        detail = f"the database's clock is {state.clock_offset_s:+.1f} s from this host's"
        yield Check(name="clock", status="warning", detail=detail, mend="run NTP on both")
    else:
        yield Check(name="clock", status="ok", detail=f"within {CLOCK_TOLERANCE_S:g} s of the database's")


def runs_folder() -> Check:
    """Where jobs of the local launcher live."""
    from hp_tool.launchers.jobs import default_root

    return folder_check("runs folder", default_root(), holds=f"{default_root()} can be written")


def folder_check(name: str, path: Path, *, holds: str) -> Check:
    """Whether a file or folder, or the nearest one above it that exists, can be written and has room."""
    nearest = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    if not os.access(nearest, os.W_OK):
        mend = "give this user the right to write it, or name another (HP_RUNS_DIR, HP_DATABASE_URL)"
        return Check(name=name, status="failed", detail=f"{nearest} cannot be written", mend=mend)
    free = shutil.disk_usage(nearest).free
    if free < LITTLE_DISK_BYTES:
        detail = f"{free / 2**20:.0f} MiB are free at {nearest}"
        return Check(name=name, status="warning", detail=detail, mend="make room before logs and results fill it")
    return Check(name=name, status="ok", detail=holds)


def profiler() -> Iterator[Check]:
    """What profile runs on this very host need: torch, Megatron Core, and the GPUs they would measure."""
    from hp_tool.launchers.devices import detect

    installed = {name: version for name in PROFILER_PACKAGES if (version := _version(name)) is not None}
    missing = [name for name in PROFILER_PACKAGES if name not in installed]
    if missing:
        yield Check(
            name="profiler",
            status="warning",
            detail=f"{' and '.join(missing)} missing: this host predicts and serves, but runs no profile jobs",
            mend="pip install 'hp-tool[profiler]'",
        )
    else:
        detail = ", ".join(f"{name} {version}" for name, version in installed.items())
        yield Check(name="profiler", status="ok", detail=detail)
    hardware = detect()
    if hardware.gpu == "cpu":
        yield Check(
            name="gpu",
            status="warning",
            detail="no NVIDIA GPU is visible: local profile runs measure `cluster.gpu: cpu` only",
            mend="run `hp-tool worker` where the GPUs are, or use search.launcher: slurm",
        )
    elif "+cpu" in installed.get("torch", ""):
        detail = f"{hardware.num_gpus} x {hardware.gpu}, but torch {installed['torch']} was built without CUDA"
        yield Check(name="gpu", status="failed", detail=detail, mend="install torch from its CUDA wheels")
    else:
        yield Check(name="gpu", status="ok", detail=f"{hardware.num_gpus} x {hardware.gpu} ({hardware.device_name})")


def slurm() -> Check:
    """Slurm's programs, all or none, and whether its controller answers. Only searches on Slurm miss it, so it never fails."""
    present = [tool for tool in SLURM_TOOLS if shutil.which(tool)]
    if not present:
        return Check(name="slurm", status="ok", detail="not on this host; only search.launcher: slurm needs it")
    if missing := [tool for tool in SLURM_TOOLS if tool not in present]:
        mend = "install Slurm's client programs (Debian: slurm-client)"
        return Check(name="slurm", status="warning", detail=f"{', '.join(missing)} missing", mend=mend)
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=20, check=False)
        answer = (done.stdout or done.stderr).strip().replace("\n", "; ")
        up = done.returncode == 0 and " UP" in answer
    except (OSError, subprocess.TimeoutExpired) as error:
        answer, up = str(error), False
    if not up:
        return Check(name="slurm", status="warning", detail=answer, mend="start slurmctld, or set SLURM_CONF to its slurm.conf")
    return Check(name="slurm", status="ok", detail=answer)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
