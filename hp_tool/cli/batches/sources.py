"""Queries of a batch, one JSON object each, from JSON lines, a stream of YAML documents or a CSV grid, in bounded memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

from hp_tool.cli.batches.grid import grid_lines
from hp_tool.errors import InputError

MAX_LINE_BYTES = 1_000_000
"""Of one query, in any of the formats."""

Item = bytes | InputError
"""A query as one line, or in its place what is wrong with it."""
Format = Literal["jsonl", "yaml", "csv"]
SUFFIXES: dict[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".csv": "csv"}

_DOCUMENT_ENDS = re.compile(rb"(---|\.\.\.)(\s|$)")
"""At the start of a line; YAML allows them nowhere else in a document, block scalars included."""


def format_of(path: str) -> Format:
    """What a file holds by its suffix; JSON lines where that says nothing."""
    return SUFFIXES.get(Path(path).suffix.lower(), "jsonl")


def items(source: BinaryIO, *, format: Format, base: Mapping[str, Any]) -> Iterator[Item]:
    """The queries of a stream in order; `base` is the mapping that every row of a CSV is laid over."""
    if format == "csv":
        return grid_lines(_physical_lines(source), base=base)
    return _documents(source) if format == "yaml" else _json_lines(source)


def _json_lines(source: BinaryIO) -> Iterator[Item]:
    """Lines as they stand, without blank ones; the rest of one that is too long is skipped."""
    for line in _bounded(source):
        if isinstance(line, InputError) or line.strip():
            yield line


def _physical_lines(source: BinaryIO) -> Iterator[str]:
    """Lines of a CSV as text. One that is too long ends the batch: nobody can say which row the next one belongs to."""
    encoding = "utf-8-sig"  # spreadsheets write a byte order mark
    for line in _bounded(source):
        if isinstance(line, InputError):
            raise line
        yield line.decode(encoding, errors="replace")
        encoding = "utf-8"


def _bounded(source: BinaryIO) -> Iterator[Item]:
    while line := source.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        _skip(source, lambda rest: rest.endswith(b"\n"), line)
        yield InputError(f"the line is longer than {MAX_LINE_BYTES:,} bytes", code="too_large")


def _skip(source: BinaryIO, ends: Callable[[bytes], bool], last: bytes) -> None:
    while last and not ends(last):
        last = source.readline(MAX_LINE_BYTES + 1)


def _documents(source: BinaryIO) -> Iterator[Item]:
    """YAML documents as JSON lines. Cut at their separators before they are parsed: one that is broken harms only itself."""
    kept: list[bytes] = []
    size = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        if _DOCUMENT_ENDS.match(line):
            yield from _document(kept, size)
            kept, size = [line[3:]], len(line)
        else:
            size += len(line)
            if size <= MAX_LINE_BYTES:
                kept.append(line)
    yield from _document(kept, size)


def _document(kept: list[bytes], size: int) -> Iterator[Item]:
    """The document whose lines these are; nothing for one of blank lines and comments."""
    from hp_tool.queries import schema

    if size > MAX_LINE_BYTES:
        yield InputError(f"the document is longer than {MAX_LINE_BYTES:,} bytes", code="too_large")
        return
    if all(not line.strip() or line.lstrip().startswith(b"#") for line in kept):
        return
    try:
        yield json.dumps(schema.parse_mapping(b"".join(kept)), allow_nan=False).encode()
    except InputError as error:
        yield error
    except (TypeError, ValueError) as error:
        yield InputError(f"the query holds a value that JSON does not know: {error}", code="syntax")
