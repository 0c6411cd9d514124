"""The two JSON files of a profile run. What is read is validated strictly; what is written appears by rename."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.requests import RunRequest

_REQUEST: TypeAdapter[RunRequest] = TypeAdapter(Annotated[RunRequest, Field(discriminator="kind")])


def read_request(path: Path) -> RunRequest:
    """The request in `path`. Raises pydantic.ValidationError where a key is unknown or a type is wrong."""
    return _REQUEST.validate_json(path.read_bytes(), strict=True)


def write_measurement(path: Path, measurement: Measurement) -> None:
    """Write `measurement` so that a reader sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(TypeAdapter(Measurement).dump_json(measurement, indent=1))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def failure_path(result: Path, *, rank: int) -> Path:
    """Where a failing rank leaves its own account: result.json -> result.rank3.json."""
    return result.with_name(f"{result.stem}.rank{rank}{result.suffix}")
