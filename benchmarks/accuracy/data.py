"""The folder of measured figures: CSV files with a header, numbers where they read as numbers."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Any

Row = dict[str, str]


def data_folder(arguments: argparse.Namespace) -> Path | None:
    """--data, else HP_REFERENCE_DATA; None (and a notice) where neither names a folder."""
    named = arguments.data or os.environ.get("HP_REFERENCE_DATA")
    if named and Path(named).is_dir():
        return Path(named)
    print(
        f"skipped: no folder of measured figures ({named or 'set --data or HP_REFERENCE_DATA'})",
        file=sys.stderr,
    )
    return None


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", help="folder of measured figures (default: HP_REFERENCE_DATA)"
    )


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
    folder = data_folder(arguments)
    if folder is not None:
        body(folder, **{name: getattr(arguments, name) for name in switches})


def print_report(
    *,
    description: str | None,
    evaluate: Callable[[Path], dict[str, Any]],
    as_text: Callable[[dict[str, Any]], str],
) -> None:
    """Run the command line of a benchmark over the folder: its report as text, or with --json as an
    object.
    """

    def body(folder: Path, *, json: bool) -> None:
        report = evaluate(folder)
        print(dumps(report, indent=2) if json else as_text(report))

    command_line(description, body, json="one JSON object on stdout")


def read(folder: Path, name: str) -> list[Row]:
    """Rows of one file; an empty list (and a notice) where the folder does not have it."""
    path = folder / name
    if not path.is_file():
        print(f"skipped: {path} is not there", file=sys.stderr)
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
