"""The folder of measured figures: CSV files with a header, numbers where they read as numbers."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path

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


def read(folder: Path, name: str) -> list[Row]:
    """Rows of one file; an empty list (and a notice) where the folder does not have it."""
    path = folder / name
    if not path.is_file():
        print(f"skipped: {path} is not there", file=sys.stderr)
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
