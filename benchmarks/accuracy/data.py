"""The folder of measured figures: CSV files with a header, numbers where they read as numbers."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, str]


def data_folder(arguments: argparse.Namespace) -> Path | None:
    """--data, else HP_REFERENCE_DATA; None (and a notice) where neither names a folder."""
    named = arguments.data or os.environ.get("HP_REFERENCE_DATA")
    if named and Path(named).is_dir():
        return Path(named)
    print(f"skipped: no folder of measured figures ({named or 'set --data or HP_REFERENCE_DATA'})", file=sys.stderr)
    return None


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="folder of measured figures (default: HP_REFERENCE_DATA)")


def write_constants(path: Path, constants: Mapping[str, object], *, command: str) -> None:
    """Write a fitted profile as YAML, with the command that made it. Through JSON, so that a part used twice is written twice:
    the catalogue accepts no aliases.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(json.loads(json.dumps(constants)), sort_keys=False, width=120)
    path.write_text(f"# Written by python -m {command}; do not edit by hand.\n{text}")


def print_report(
    *, description: str | None, evaluate: Callable[[Path], dict[str, Any]], as_text: Callable[[dict[str, Any]], str]
) -> None:
    """The command line of a benchmark over the folder: its report as text, or with --json as an object."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    folder = data_folder(arguments)
    if folder is not None:
        report = evaluate(folder)
        print(json.dumps(report, indent=2) if arguments.json else as_text(report))


def read(folder: Path, name: str) -> list[Row]:
    """Rows of one file; an empty list (and a notice) where the folder does not have it."""
    path = folder / name
    if not path.is_file():
        print(f"skipped: {path} is not there", file=sys.stderr)
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
