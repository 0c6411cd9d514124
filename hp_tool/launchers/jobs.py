"""A job's folder: the files that every launcher writes before a job starts and reads after it ended."""

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
"""How much of the end of a log is read: thousands of steps."""
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,128}")


def check_name(name: str) -> str:
    """`name` itself. Raises InputError for one that is no file name everywhere or would leave the runs' folder."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(f"job name {name!r} must be 1 to 128 of a-z A-Z 0-9 . _ -", field="job_name")
    return name


def default_root() -> Path:
    """HP_RUNS_DIR, else the user's data folder."""
    from platformdirs import user_data_path

    configured = os.environ.get("HP_RUNS_DIR")
    return Path(configured) if configured else user_data_path("hp-tool") / "runs"


def create_folder(folder: Path, *, files: Mapping[str, str]) -> None:
    """Create `folder` with all its files in one step; an existing one is left alone. Raises InputError for a bad file name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="~", dir=folder.parent))
    try:
        for name, text in files.items():
            (temporary / check_name(name)).write_text(text)
        temporary.rename(folder)  # fails if another process was first: the folder is not empty
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def mark(folder: Path, name: str) -> None:
    """Create the empty file `name` in `folder`, and the folder if it does not exist."""
    create_folder(folder, files={name: ""})
    (folder / name).touch()


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if the file is missing or incomplete. Raises OSError if it cannot be read."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write `value` as `write_text` does."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically: a reader sees all of it or nothing."""
    temporary = path.with_name(f"~{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def log_tail(folder: Path, *, name: str = LOG, size_bytes: int = 4096) -> str:
    """The end of the job's log, or of another file in its folder; empty if it does not exist."""
    try:
        with (folder / name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - size_bytes))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def output(folder: Path, *, name: str | None = None) -> str:
    """The end of a job's log, or of the file `name` that it left in its folder; empty if it does not exist."""
    return log_tail(folder, name=LOG if name is None else check_name(name), size_bytes=MAX_OUTPUT_BYTES)


def plan_json(plan: LaunchPlan) -> str:
    """A plan as JSON, with the text of its files."""
    return PLAN_JSON.dump_json(plan, indent=2).decode()


def last_line(tail: str) -> str:
    """The last line of a log that is not empty or a rule, cut to 300 characters."""
    return next((line.strip()[:300] for line in reversed(tail.splitlines()) if line.strip(" =-")), "the log is empty")
