"""The columns of every kind of table: names, types, units and meanings, from schema.csv.

Names are those of hp_tool's queries and results wherever a column is one of their fields. The
loader validates rows against this module, and evidence/README.md is written from it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

Type = Literal["text", "integer", "number", "flag", "date"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    name: str
    type: Type
    meaning: str
    unit: str = ""
    required: bool = False
    positive: bool = True
    """Whether numbers must exceed zero; negative numbers are never allowed."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of table; a file may omit columns that are not required."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Column]:
        return {column.name: column for column in self.columns}


def _kinds() -> dict[str, Kind]:
    """Return the kinds in schema.csv; a line without a column name describes the kind as a
    whole.
    """
    with Path(__file__).with_name("schema.csv").open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    return {
        kind["kind"]: Kind(
            name=kind["kind"],
            meaning=kind["meaning"],
            columns=tuple(
                _column(line) for line in lines if line["kind"] == kind["kind"] and line["name"]
            ),
        )
        for kind in lines
        if not kind["name"]
    }


def _column(line: Mapping[str, str]) -> Column:
    type_ = next(name for name in get_args(Type) if name == line["type"])
    return Column(
        name=line["name"],
        type=type_,
        meaning=line["meaning"],
        unit=line["unit"],
        required=line["needs"] == "a value",
        positive=line["needs"] != "zero or more",
    )


KINDS = _kinds()
TRAINING, SERVING = KINDS["training"], KINDS["serving"]
