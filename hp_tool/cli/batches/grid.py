"""A CSV as queries: a column is a key of a query, a cell a value or several, and a row all combinations of its cells."""

from __future__ import annotations

import copy
import csv
import difflib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hp_tool.api import SHORT_KEYS
from hp_tool.errors import InputError

SHORT = {
    "tp": "parallel.tensor_parallel_size",
    "pp": "parallel.pipeline_parallel_size",
    "vpp": "parallel.virtual_pipeline_parallel_size",
    "cp": "parallel.context_parallel_size",
    "ep": "parallel.expert_parallel_size",
    "etp": "parallel.expert_tensor_parallel_size",
    "dp": "parallel.data_parallel_size",
    "mbs": "parallel.micro_batch_size",
    "sp": "parallel.sequence_parallel",
    "recompute": "parallel.recompute",
    "zero": "parallel.zero_stage",
    "gpus_per_node": "cluster.gpus_per_node",
    **SHORT_KEYS,
}
"""Columns that need no dotted path: abbreviations of the sizes, and the flags of `hp-tool estimate`."""


def grid_lines(lines: Iterator[str], *, base: Mapping[str, Any]) -> Iterator[bytes | InputError]:
    """A JSON line for every combination of every row, the last column varying fastest.

    An empty cell leaves its key out. Commas between values make a cell a list of alternatives, as in `1,2,4`; brackets and
    braces hold one value together, as in `[1,2]` or `{granularity: full, method: block, num_layers: 4}`. The `id` of a line
    is that of its row (the row's number where there is none) and what distinguishes it within the row.
    """
    reader = csv.reader(lines, strict=True)
    try:
        columns = next(reader, None)
    except csv.Error as error:
        raise InputError(f"the header is no line of a CSV: {error}") from None
    if columns is None:
        return
    columns = [column.strip() for column in columns]
    paths = _paths(columns)
    for number in itertools.count(1):
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if any(cell.strip() for cell in cells):
                yield from _row(number, cells, columns=columns, paths=paths, base=base)
        except csv.Error as error:
            yield InputError(f"row {number}: {error}", code="syntax")


def _paths(columns: Sequence[str]) -> list[str]:
    """Dotted paths of the columns. Raises InputError for one that no query has, or that stands twice."""
    from hp_tool.domain.query import Query

    first = {*Query.__slots__}
    paths = [SHORT.get(column, column) for column in columns]
    for column, path in zip(columns, paths, strict=True):
        if path.partition(".")[0] not in first:
            near = difflib.get_close_matches(column, [*SHORT, *first], n=1)
            hint = f"did you mean {near[0]}?" if near else f"use a query's dotted path or one of {', '.join(SHORT)}"
            raise InputError(f"unknown column {column!r}; {hint}", field=column or None, code="unknown_key")
        if paths.count(path) > 1:
            raise InputError(f"{path} stands in more than one column", field=column)
    return paths


def _row(
    number: int, cells: Sequence[str], *, columns: Sequence[str], paths: Sequence[str], base: Mapping[str, Any]
) -> Iterator[bytes | InputError]:
    from hp_tool.queries import schema

    try:
        if len(cells) != len(columns):
            raise InputError(f"row {number} has {len(cells)} cells under {len(columns)} columns; quote a cell with commas")
        axes = [_alternatives(cell, where=f"row {number}, {column}") for cell, column in zip(cells, columns, strict=True)]
    except InputError as error:
        yield error
        return
    given = [index for index, values in enumerate(axes) if values]
    varied = [index for index in given if len(axes[index]) > 1]
    for values in itertools.product(*(axes[index] for index in given)):
        chosen = dict(zip(given, values, strict=True))
        query = copy.deepcopy(dict(base))
        try:
            schema.lay(query, {paths[index]: value for index, value in chosen.items()})
            query.setdefault("kind", "inference" if "inference" in query else "training")
            name = str(query.get("id") or number)
            query["id"] = " ".join((name, *(f"{columns[index]}={_word(chosen[index])}" for index in varied)))
            yield json.dumps(query, allow_nan=False).encode()
        except (InputError, TypeError, ValueError) as error:
            yield error if isinstance(error, InputError) else InputError(f"row {number}: {error}", code="invalid_value")


def _alternatives(cell: str, *, where: str) -> list[Any]:
    """The values of a cell: it is read as a YAML list without its brackets."""
    import yaml

    from hp_tool.documents import load_yaml

    if not cell.strip():
        return []
    try:
        values = load_yaml(f"[{cell}]")
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", None) or error
        raise InputError(f"{where}: {cell[:80]!r} is not YAML: {reason}", code="syntax") from None
    if not isinstance(values, list):
        raise InputError(f"{where}: {cell[:80]!r} is not a value or a list of values", code="syntax")
    return values


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
