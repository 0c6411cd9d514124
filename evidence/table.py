"""Read, check and write tables: CSV files with a header, whose columns are defined by a Kind."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.arithmetic import find_contradictions
from evidence.schema import Column, Kind

FOLDER = Path(__file__).parent
with (FOLDER / "tables.csv").open(newline="", encoding="utf-8") as _stream:
    TABLES: Mapping[str, Mapping[str, str]] = {
        line["table"]: line for line in csv.DictReader(_stream)
    }
"""The file of each table, by the name that the column `table` repeats, and what reports call its
rows.
"""
FILE_OF = {table: line["file"] for table, line in TABLES.items()}
Row = Mapping[str, Any]
"""Values of all columns of the row's kind; None if blank."""
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")
_OTHER = re.compile(r"[^=;]+=[^;]+(; [^=;]+=[^;]+)*")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A reason to reject a row."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


class RefusedError(ValueError):
    """Error for rows that violate the schema or whose figures contradict each other."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def files(kind: str) -> list[Path]:
    return sorted((FOLDER / kind).glob("*.csv"))


def read(path: Path, kind: Kind) -> list[Row]:
    """Return the rows of one file.

    Raises:
        RefusedError: Some rows violate the schema or contradict themselves; the message lists all
            of them.
    """
    rows, problems = read_with_problems(path, kind)
    if problems:
        raise RefusedError(problems)
    return rows


def read_with_problems(path: Path, kind: Kind) -> tuple[list[Row], list[Problem]]:
    """Return (consistent rows, reasons why the remaining rows are inconsistent)."""
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream, strict=True)
        unknown = [name for name in reader.fieldnames or () if name not in kind.by_name]
        if unknown:
            reason = f"unknown columns of kind {kind.name}: {', '.join(unknown)}"
            return [], [Problem(path=path, line=1, reason=reason)]
        rows, problems = [], []
        for cells in reader:
            row, reasons = parse(cells, kind)
            rows += [] if reasons else [row]
            problems += [
                Problem(path=path, line=reader.line_num, reason=reason) for reason in reasons
            ]
    return rows, problems


def parse(cells: Mapping[Any, Any], kind: Kind) -> tuple[Row, list[str]]:
    """Return (typed row, reasons to reject it) for a row of text."""
    if None in cells:
        return {}, ["more cells than columns: quote values that contain a comma"]
    row: dict[str, Any] = {}
    reasons = []
    for column in kind.columns:
        try:
            row[column.name] = _value(cells.get(column.name) or "", column)
        except ValueError as error:
            reasons.append(f"{column.name}: {error}")
    if reasons or row.get("excluded"):
        return row, reasons
    return row, find_contradictions(row, kind.name)


def _value(cell: str, column: Column) -> Any:
    if not cell:
        if column.required:
            raise ValueError("missing")
        return None
    if column.type in ("integer", "number"):
        value = int(cell) if column.type == "integer" else float(cell)
        if not (value > 0 if column.positive else value >= 0):
            raise ValueError(f"{cell} is {'not above zero' if column.positive else 'negative'}")
        return value
    if column.type == "flag":
        if cell not in ("true", "false"):
            raise ValueError(f"{cell!r} is neither true nor false")
        return cell == "true"
    if column.type == "date" and not _DATE.fullmatch(cell):
        raise ValueError(f"{cell!r} is not an ISO date (2026-08-21, 2026-08 or 2026)")
    if column.name == "other" and not _OTHER.fullmatch(cell):
        raise ValueError(f"{cell!r} is not `name=value; name=value`")
    return cell


def cell_of(value: object) -> str:
    """Return a value as written to a file; `_value` parses it without loss."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


def as_csv(rows: Iterable[Row], kind: Kind) -> str:
    """Return the text of a CSV file. Columns are in the order of the schema; columns without any
    value are omitted.
    """
    rows = list(rows)
    names = [
        column.name
        for column in kind.columns
        if column.required or any(row.get(column.name) is not None for row in rows)
    ]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([cell_of(row.get(name)) for name in names] for row in rows)
    return stream.getvalue()


def other_values(row: Row) -> dict[str, str]:
    """Return the values in a row's column `other_values` as {name: value}."""
    pairs = (row["other"] or "").split("; ")
    return dict(pair.split("=", 1) for pair in pairs if pair)
