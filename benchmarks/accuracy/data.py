"""The folder of measured figures: evidence/, or another that is laid out like it."""

from __future__ import annotations

import argparse
import csv
import functools
import os
import sys
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Any

from evidence import table as evidence
from evidence.schema import KINDS

Row = dict[str, str]


def data_folder(arguments: argparse.Namespace) -> Path:
    """Return --data, else HP_REFERENCE_DATA, else evidence/.

    Raises:
        SystemExit: The named folder does not exist.
    """
    return folder_named(arguments.data)


def folder_named(name: str | Path | None = None) -> Path:
    """Return the named folder, else HP_REFERENCE_DATA's, else evidence/."""
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
    """Return the rows of one table of `evidence.table.FILES`, by its name.

    Args:
        folder: Folder laid out like evidence/; of one that has no table, evidence/ is read.
        table: Name of the table.
        excluded: Return excluded rows too.
    """
    path = _tables_of(folder) / f"{evidence.FILE_OF[table]}.csv"
    if not path.is_file():
        print(f"skipped: {folder} has no table {table}", file=sys.stderr)
        return []
    every = _rows_of(path, path.stat().st_mtime_ns)
    return [row for row in every if row["table"] == table and (excluded or not row["excluded"])]


@functools.cache
def _tables_of(folder: Path) -> Path:
    if any((folder / kind).is_dir() for kind in KINDS):
        return folder
    print(
        f"{folder} has no folder of tables ({', '.join(KINDS)}): they are read from "
        f"{evidence.FOLDER}",
        file=sys.stderr,
    )
    return evidence.FOLDER


@functools.cache
def _rows_of(path: Path, changed_ns: int) -> list[evidence.Row]:
    """Return the rows of a file, read once until it changes."""
    return evidence.read(path, KINDS[path.parent.name])


def command_line(description: str | None, body: Callable[..., None], **switches: str) -> None:
    """Run the command line of a module over the folder of measured figures: `body(folder,
    switch=...)`.

    switches: help by name, all off unless given.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data_argument(parser)
    for name, words in switches.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=words)
    arguments = parser.parse_args()
    body(data_folder(arguments), **{name: getattr(arguments, name) for name in switches})


def print_report(
    *,
    description: str | None,
    evaluate: Callable[[Path], dict[str, Any]],
    as_text: Callable[[dict[str, Any]], str],
    as_dict: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Run the command line of a benchmark over the folder: its report as text, or with --json as an
    object.
    """

    def body(folder: Path, *, json: bool) -> None:
        report = evaluate(folder)
        print(dumps(as_dict(report), indent=2) if json else as_text(report))

    command_line(description, body, json="one JSON object on stdout")


def read(folder: Path, name: str) -> list[Row]:
    """Rows of one file; an empty list (and a notice) where the folder does not have it."""
    path = folder / name
    if not path.is_file():
        print(f"skipped: {path} is not there", file=sys.stderr)
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
