"""Read the queries of a batch in bounded memory: JSON lines, a stream of YAML documents, or a CSV
grid.
"""

import copy
import csv
import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal

from hp_tool.cli.queries import read_yaml
from hp_tool.errors import InputError
from hp_tool.questions.short_names import COLUMNS

MAX_LINE_BYTES = 1_000_000
"""Maximum size of a query in bytes, in any format."""

Item = bytes | InputError
"""A query as one JSON line, or the error for an unreadable query."""
Format = Literal["jsonl", "yaml", "csv"]
SUFFIXES: dict[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".csv": "csv"}

_DOCUMENT_ENDS = re.compile(rb"(---|\.\.\.)(\s|$)")
"""Separators of documents. YAML allows these at the start of a line only between documents."""


def read_items(source: BinaryIO, *, format: Format, base: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the queries in a stream, in order. The values of CSV rows are set in copies of
    `base`.
    """
    if format == "csv":
        return expand_grid(_physical_lines(source), base=base)
    if format == "yaml":
        return _yaml_documents(source)
    return (line for line in _bounded_lines(source) if isinstance(line, InputError) or line.strip())


def _physical_lines(source: BinaryIO) -> Iterator[str]:
    """Yield the lines of a CSV file as text. A line that is too long ends the batch, because it is
    unknown to which row the next line belongs.
    """
    encoding = "utf-8-sig"  # Spreadsheets write a byte order mark.
    for line in _bounded_lines(source):
        if isinstance(line, InputError):
            raise line
        yield line.decode(encoding, errors="replace")
        encoding = "utf-8"


def _bounded_lines(source: BinaryIO) -> Iterator[Item]:
    """Yield the lines. A line that is too long is replaced by an error."""
    while line := source.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = source.readline(MAX_LINE_BYTES + 1)
        yield InputError(f"the line is longer than {MAX_LINE_BYTES:,} bytes", code="too_large")


def _yaml_documents(source: BinaryIO) -> Iterator[Item]:
    """Yield YAML documents as JSON lines. The stream is split before parsing, so that an invalid
    document affects only its own answer.
    """
    lines: list[bytes] = []
    size = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        if _DOCUMENT_ENDS.match(line):
            yield from _document_line(lines, size)
            lines, size = [line[3:]], len(line)
        else:
            size += len(line)
            if size <= MAX_LINE_BYTES:
                lines.append(line)
    yield from _document_line(lines, size)


def _document_line(lines: list[bytes], size: int) -> Iterator[Item]:
    """Yield the document in these lines, or nothing if all lines are blank or comments."""
    from hp_tool.questions import schema

    if size > MAX_LINE_BYTES:
        yield InputError(f"the document is longer than {MAX_LINE_BYTES:,} bytes", code="too_large")
        return
    if all(not line.strip() or line.lstrip().startswith(b"#") for line in lines):
        return
    try:
        yield json.dumps(schema.parse_mapping(b"".join(lines)), allow_nan=False).encode()
    except InputError as error:
        yield error
    except (TypeError, ValueError) as error:
        yield InputError(
            f"the query has a value that JSON does not support: {error}", code="syntax"
        )


def expand_grid(lines: Iterator[str], *, base: Mapping[str, Any]) -> Iterator[bytes | InputError]:
    """Yield a JSON line for every combination of values in every row. The last column varies
    fastest.

    An empty cell omits its key. Commas separate alternatives, as in `1,2,4`. Brackets and braces
    enclose one value, as in `[1,2]` or `{granularity: full, method: block, num_layers: 4}`. The
    `id` of a line is the id of its row (by default, the row number), followed by the values that
    distinguish the line within the row.
    """
    reader = csv.reader(lines, strict=True)
    try:
        columns = next(reader, None)
    except csv.Error as error:
        raise InputError(f"the header is not valid CSV: {error}") from None
    if columns is None:
        return
    columns = [column.strip() for column in columns]
    paths = _column_paths(columns)
    for number in itertools.count(1):
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if any(cell.strip() for cell in cells):
                yield from _expand_row(number, cells, columns=columns, paths=paths, base=base)
        except csv.Error as error:
            yield InputError(f"row {number}: {error}", code="syntax")


def _column_paths(columns: Sequence[str]) -> list[str]:
    """Return the dotted path of each column.

    Raises:
        InputError: A path does not exist in a query, or occurs twice.
    """
    from hp_tool.domain.query import Query

    first = {*Query.__slots__}
    paths = [COLUMNS.get(column, column) for column in columns]
    for column, path in zip(columns, paths, strict=True):
        if path.partition(".")[0] not in first:
            near = difflib.get_close_matches(column, [*COLUMNS, *first], n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"use a query's dotted path or one of {', '.join(COLUMNS)}"
            )
            raise InputError(
                f"unknown column {column!r}; {hint}", field=column or None, code="unknown_key"
            )
        if paths.count(path) > 1:
            raise InputError(f"{path} occurs in more than one column", field=column)
    return paths


def _expand_row(
    number: int,
    cells: Sequence[str],
    *,
    columns: Sequence[str],
    paths: Sequence[str],
    base: Mapping[str, Any],
) -> Iterator[bytes | InputError]:
    from hp_tool.questions import schema

    try:
        if len(cells) != len(columns):
            raise InputError(
                f"row {number} has {len(cells)} cells under {len(columns)} columns; quote a cell "
                "with commas"
            )
        axes = [
            _parse_cell(cell, where=f"row {number}, {column}")
            for cell, column in zip(cells, columns, strict=True)
        ]
    except InputError as error:
        yield error
        return
    filled = [index for index, values in enumerate(axes) if values]
    varied = [index for index in filled if len(axes[index]) > 1]
    for values in itertools.product(*(axes[index] for index in filled)):
        chosen = dict(zip(filled, values, strict=True))
        query = copy.deepcopy(dict(base))
        try:
            schema.set_paths(query, {paths[index]: value for index, value in chosen.items()})
            query.setdefault("kind", "inference" if "inference" in query else "training")
            name = str(query.get("id") or number)
            query["id"] = " ".join(
                (name, *(f"{columns[index]}={_cell_text(chosen[index])}" for index in varied))
            )
            yield json.dumps(query, allow_nan=False).encode()
        except (InputError, TypeError, ValueError) as error:
            yield (
                error
                if isinstance(error, InputError)
                else InputError(f"row {number}: {error}", code="invalid_value")
            )


def _parse_cell(cell: str, *, where: str) -> list[Any]:
    """Return the values in a cell, which is parsed as a YAML list without its brackets."""
    if not cell.strip():
        return []
    values = read_yaml(f"[{cell}]", refusal=f"{where}: {cell[:80]!r} is not YAML", code="syntax")
    if not isinstance(values, list):
        raise InputError(
            f"{where}: {cell[:80]!r} is not a value or a list of values", code="syntax"
        )
    return values


def _cell_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
