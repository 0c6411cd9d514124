"""The folder of measured figures: evidence/, a folder with the same layout, or a folder of tables
in the format of their sources (`evidence.collected`).
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.accuracy.tables import as_text
from evidence import table as evidence
from evidence.collected import read_collected
from evidence.schema import KINDS

Row = dict[str, str]


def data_folder(arguments: argparse.Namespace) -> Path:
    """Return --data, else HP_REFERENCE_DATA, else evidence/.

    Raises:
        SystemExit: The named folder does not exist.
    """
    return folder_named(arguments.data)


def folder_named(name: str | Path | None = None) -> Path:
    """Return the named folder, otherwise HP_REFERENCE_DATA, otherwise evidence/."""
    named = name or os.environ.get("HP_REFERENCE_DATA")
    if named and not Path(named).is_dir():
        raise SystemExit(f"No folder of measured figures: {named} (--data or HP_REFERENCE_DATA)")
    return Path(named) if named else evidence.FOLDER


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder of measured figures (default: HP_REFERENCE_DATA, else evidence/)",
    )


def rows(folder: Path, table: str, *, excluded: bool = False) -> list[evidence.Row]:
    """Return the rows of one table of evidence/tables.csv, by its name.

    Args:
        folder: Folder laid out like evidence/, or of files TABLE.csv with the columns of their
            sources. If it has no table at all, evidence/ is read.
        table: Name of the table.
        excluded: Return excluded rows too.
    """
    tables = _tables_of(folder)
    ours, collected = tables / f"{evidence.FILE_OF[table]}.csv", tables / f"{table}.csv"
    path = ours if ours.is_file() else collected
    if not path.is_file():
        print(f"skipped: {folder} has no table {table}", file=sys.stderr)
        return []
    every = _rows_of(path, table, path == collected, path.stat().st_mtime_ns)
    return [row for row in every if excluded or not row["excluded"]]


@functools.cache
def _tables_of(folder: Path) -> Path:
    collected = any((folder / f"{table}.csv").is_file() for table in evidence.FILE_OF)
    if collected or any((folder / kind).is_dir() for kind in KINDS):
        return folder
    print(
        f"{folder} has no tables of measured figures: they are read from {evidence.FOLDER}",
        file=sys.stderr,
    )
    return evidence.FOLDER


@functools.cache
def _rows_of(path: Path, table: str, collected: bool, changed_ns: int) -> list[evidence.Row]:
    """Return the rows of a table; cached until the file changes."""
    if collected:
        return read_collected(path, table)
    kind = KINDS[evidence.FILE_OF[table].partition("/")[0]]
    return [row for row in evidence.read(path, kind) if row["table"] == table]


def print_report(
    *,
    description: str | None,
    evaluate: Callable[..., Any],
    as_dict: Callable[[Any], Any] = lambda report: report,
    needs_data: bool = True,
) -> None:
    """Run the command line of a benchmark: print its report as text, or with --json as one JSON
    value.

    Args:
        description: Help text of the command.
        evaluate: Function that returns the report. If `needs_data`, its argument is the folder of
            measured figures.
        as_dict: Function that converts the report to JSON types.
        needs_data: Offer --data.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if needs_data:
        add_data_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    arguments = parser.parse_args()
    report = evaluate(data_folder(arguments)) if needs_data else evaluate()
    print(json.dumps(as_dict(report), indent=2) if arguments.json else as_text(report))


def read(folder: Path, name: str) -> list[Row]:
    """Return the rows of one file; an empty list (with a notice) if the folder does not have it."""
    path = folder / name
    if not path.is_file():
        print(f"skipped: {path} does not exist", file=sys.stderr)
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
