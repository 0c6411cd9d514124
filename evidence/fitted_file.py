"""Fitted constants as fields of catalog files, for writing or comparing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

import yaml

from hp_tool.catalog import documents
from hp_tool.catalog.efficiency import FOLDER

TOLERANCE = 1e-3
"""Relative difference up to which two constants count as equal; fits round to four digits."""


@dataclass(frozen=True, kw_only=True)
class FittedFile:
    """Values that one fit determines in one catalog file."""

    file: str
    """Path below `hp_tool/catalog/data/efficiency`."""
    fields: Mapping[str, Any]
    keeps: tuple[str, ...] | None = ()
    """Other fields of the file that are preserved because other fits write them; None: all other
    fields.
    """

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return FOLDER / self.file

    def stored(self) -> dict[str, Any]:
        """Return the fields that the file has now; empty if the file does not exist."""
        return documents.read(self.path) if self.path.is_file() else {}

    def write(self, *, command: str = "python -m evidence.fit") -> None:
        """Write the fields, and write `command` into the first line.

        Values that occur twice are written twice, because the catalog does not use aliases.
        """
        stored_fields = self.stored()
        if self.keeps is None:
            fields = {**stored_fields, **self.fields}
        else:
            fields = {
                **self.fields,
                **{name: stored_fields[name] for name in self.keeps if name in stored_fields},
            }
        ordered = {name: fields[name] for name in [*stored_fields, *fields] if name in fields}
        text = yaml.safe_dump(loads(dumps(ordered)), sort_keys=False, width=120)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = f"# Written by {command}; do not edit by hand.\n"
        self.path.write_text(head + text, encoding="utf-8")

    def differences(self) -> Iterator[str]:
        """Yield a line for each field whose stored value differs from the fitted one."""
        stored_fields, fitted = self.stored(), loads(dumps(self.fields))
        names = (
            fitted
            if self.keeps is None
            else [*fitted, *(set(stored_fields) - {*self.keeps, *fitted})]
        )
        for name in names:
            yield from _differences(
                stored_fields.get(name), fitted.get(name), f"{self.file}: {name}"
            )


def _differences(stored: Any, fitted: Any, where: str) -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(fitted, dict):
        for name in [*stored, *(set(fitted) - set(stored))]:
            yield from _differences(stored.get(name), fitted.get(name), f"{where}.{name}")
    elif isinstance(stored, list) and isinstance(fitted, list) and len(stored) == len(fitted):
        for number, pair in enumerate(zip(stored, fitted, strict=True)):
            yield from _differences(*pair, f"{where}[{number}]")
    elif isinstance(stored, float | int) and isinstance(fitted, float | int):
        if not math.isclose(stored, fitted, rel_tol=TOLERANCE):
            yield f"{where} is {stored}, fitted {fitted}"
    elif stored != fitted:
        yield f"{where} is {stored!r}, fitted {fitted!r}"
