"""A job's folder: what every launcher writes before a job starts and reads after it ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from hp_tool.domain.ports import LaunchPlan
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError

REQUEST = "request.json"
REQUEST_JSON: TypeAdapter[RunRequest] = TypeAdapter(Annotated[RunRequest, Field(discriminator="kind")])
PLAN_JSON = TypeAdapter(LaunchPlan)
RESULT = "result.json"
LOG = "job.log"
MAX_OUTPUT_BYTES = 16 * 2**20
"""Of a log, its end: thousands of steps."""
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,128}")


def check_name(name: str) -> str:
    """`name` itself. Raises InputError for what cannot be a file name everywhere or would leave the runs' folder."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(f"job name {name!r} must be 1 to 128 of a-z A-Z 0-9 . _ -", field="job_name")
    return name


def default_root() -> Path:
    """HP_RUNS_DIR, else the user's data folder."""
    from platformdirs import user_data_path

    configured = os.environ.get("HP_RUNS_DIR")
    return Path(configured) if configured else user_data_path("hp-tool") / "runs"


def create_folder(folder: Path, *, files: Mapping[str, str]) -> None:
    """Make `folder` with all its files in one step; one that exists stays as it is. Raises InputError for a bad file name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="~", dir=folder.parent))
    try:
        for name, text in files.items():
            (temporary / check_name(name)).write_text(text)
        temporary.rename(folder)  # fails on a folder that is not empty: somebody was first
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def mark(folder: Path, name: str) -> None:
    """Leave the empty file `name` in `folder`, which is made with it where it does not exist."""
    create_folder(folder, files={name: ""})
    (folder / name).touch()


def num_nodes(request: RunRequest, *, gpus_per_node: int, max_nodes: int) -> int:
    """Nodes for the request's devices, all with equally many. Raises InputError where a cluster cannot give them."""
    nodes = nodes_for(request.num_gpus, gpus_per_node=gpus_per_node, max_nodes=max_nodes)
    if nodes > request.num_processes:
        message = f"vLLM is run on one node; {request.num_gpus} devices are {nodes}"
        raise InputError(message, code="launcher_mismatch", field="cluster.num_gpus")
    return nodes


def nodes_for(num_gpus: int, *, gpus_per_node: int, max_nodes: int) -> int:
    """As num_nodes, from a number of devices."""
    if num_gpus <= gpus_per_node:
        return 1
    nodes, left = divmod(num_gpus, gpus_per_node)
    if left or nodes > max_nodes:
        raise InputError(
            f"a job of {num_gpus} devices does not fit: it may have {max_nodes} nodes of {gpus_per_node}, each used whole "
            "where there are several",
            code="launcher_mismatch",
            field="cluster.num_gpus",
        )
    return nodes


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None where the file is missing or not whole. OSError where that cannot be told."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write `value` so that a reader sees all of it or nothing."""
    temporary = path.with_name(f"~{path.name}")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def log_tail(folder: Path, *, name: str = LOG, size_bytes: int = 4096) -> str:
    """The end of the job's log (or of another one in its folder); empty where there is none."""
    try:
        with (folder / name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - size_bytes))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def output(folder: Path, *, name: str | None = None) -> str:
    """The end of a job's log, or of a file that it left in its folder under `name`; empty where there is none."""
    return log_tail(folder, name=LOG if name is None else check_name(name), size_bytes=MAX_OUTPUT_BYTES)


def described(plan: LaunchPlan) -> str:
    """A plan as JSON; the text of its files too."""
    return PLAN_JSON.dump_json(plan, indent=2).decode()


def last_line(tail: str) -> str:
    """The last line of a log that says something, 300 characters of it at most."""
    return next((line.strip()[:300] for line in reversed(tail.splitlines()) if line.strip(" =-")), "the log is empty")
