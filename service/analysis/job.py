"""Exchange a request and its answer with the child process that analyses an upload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_tool import errors
from hp_tool.domain.query import Query
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions import schema
from hp_tool.traces.explain.explanation import Explanation
from hp_tool.traces.explain.logged import LoggedExplanation

MIB = 2**20
JOB = "job.pickle"
"""File in the upload's folder that describes the job to the child process."""
ANSWER, ERROR = "answer.json", "error.json"
"""Names of the result files. The child process writes one of them."""
MAX_ANSWER_BYTES = 32 * MIB
TOO_COSTLY = "request_too_costly"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one analysis."""

    memory_mib: float
    """Address space that the analysis may allocate beyond the loaded program, in MiB."""
    cpu_s: float
    max_combinations: int
    max_values: int
    max_yaml_bytes: int

    def out_of_memory(self) -> InputError:
        """Return the error for an upload that needs too much memory."""
        return InputError(
            f"Reading this upload needs more than {self.memory_mib:g} MiB of memory "
            "(HP_MAX_UPLOAD_MEMORY_MIB). "
            "Record fewer steps, or send fewer ranks.",
            field="trace",
            code=TOO_COSTLY,
        )

    def out_of_time(self) -> InputError:
        """Return the error for an upload that needs too much CPU time."""
        return InputError(
            f"Reading this upload needs more than {self.cpu_s:g} s of processor time "
            "(HP_MAX_CPU_SECONDS_PER_UPLOAD). "
            "Record fewer steps, or send fewer ranks.",
            field="trace",
            code=TOO_COSTLY,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One upload to analyse."""

    paths: Sequence[Path]
    """Uploaded files, in the folder that receives the answer."""
    names: Sequence[str]
    """File names for error messages."""
    query: Query | None
    limits: Limits


def write_error(folder: Path, error: HpToolError) -> None:
    """Write an error into the folder for the service."""
    values = {
        "kind": type(error).__name__,
        "message": error.message,
        "field": error.field,
        "code": error.code,
    }
    (folder / ERROR).write_text(json.dumps(values))


def read_error(folder: Path) -> HpToolError | None:
    """Return the error that the child process wrote; None if there is none."""
    path = folder / ERROR
    if not path.is_file():
        return None
    values: Mapping[str, Any] = json.loads(path.read_text())
    kind: type[HpToolError] = getattr(errors, values["kind"])
    return kind(values["message"], field=values["field"], code=values["code"])


def parse_answer(content: bytes) -> Explanation | LoggedExplanation:
    """Parse an answer in JSON."""
    kind = Explanation if b'"critical_rank":' in content else LoggedExplanation
    answer: Explanation | LoggedExplanation = schema.adapter(kind).validate_json(content)
    return answer
