"""Reports as text: records as tables, other figures by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
LONG = 48
"""Minimum number of characters for which a column is placed last."""


def as_text(report: object) -> str:
    """Return a report of mappings, lists, dataclasses and figures as text.

    If an object has a method `as_text`, its text is used.
    """
    return "\n".join(_lines(report)).strip("\n")


def _lines(value: object, name: str = "") -> Iterator[str]:
    heading = [name] if name else []
    if hasattr(value, "as_text"):
        yield from ("", value.as_text())
    elif records := _records(value):
        yield from ("", *heading, *table(records))
    elif isinstance(value, Mapping):
        yield from ("", *heading)
        for key, each in value.items():
            yield from _lines(each, str(key))
    elif isinstance(value, list):
        for each in value:
            yield from _lines(each, name)
    else:
        yield f"  {name}: {cell(value)}"


def _records(value: object) -> list[Record]:
    """Return the rows of a table: a list of records, or a mapping of records by name."""
    if isinstance(value, list):
        rows = [dataclasses.asdict(each) if _is_dataclass(each) else each for each in value]
    elif isinstance(value, Mapping):
        rows = [
            {"": name, **each} if isinstance(each, Mapping) else each
            for name, each in value.items()
        ]
    else:
        return []
    return rows if all(isinstance(row, Mapping) and _is_flat(row) for row in rows) else []


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not hasattr(value, "as_text")


def _is_flat(row: Record) -> bool:
    return not any(hasattr(value, "as_text") or _records(value) for value in row.values())


def table(records: Sequence[Record]) -> list[str]:
    """Return the lines of a table whose columns are the records' keys. Columns with long text come
    last; figures are right-aligned.
    """
    columns = []
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records]
        texts = [name, *map(cell, values)]
        width = max(map(len, texts))
        is_figure = any(isinstance(value, int | float) for value in values)
        columns.append([text.rjust(width) if is_figure else text.ljust(width) for text in texts])
    columns.sort(key=lambda texts: len(texts[0]) > LONG)
    return [f"  {'  '.join(cells)}".rstrip() for cells in zip(*columns, strict=True)]


def cell(value: object) -> str:
    """Return a value as text: figures with four digits, an empty text for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000.0 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items())
    return f"{value:,}" if type(value) is int else str(value)
