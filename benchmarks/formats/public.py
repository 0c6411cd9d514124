"""`python -m benchmarks.formats.public FOLDER`: check how public files are imported, against a
list.

`tests/formats/public_files.csv` lists for each file which run it describes, whether the file is
complete, and what `hp-tool import` must return. FOLDER contains the files as OWNER+NAME/PATH;
this repository does not include them.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hp_tool.errors import HpToolError
from hp_tool.formats.exchange import read_configuration
from hp_tool.questions import schema

LIST = Path(__file__).parents[2] / "tests/formats/public_files.csv"
OUTCOMES = (
    "read exactly",
    "refused for the true reason",
    "refused for a wrong reason",
    "misread",
    "not at hand",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicFile:
    """A row of the list of public files."""

    repository: str
    ref: str
    path: str
    line: int | None
    """Line of the command in a Markdown page; None if the file is imported as a whole."""
    kind: str
    """What the file describes."""
    complete: bool
    """True if the file describes a complete run of a modelled kind, for an importable tool."""
    expected: str
    """read, or refused."""
    reason: str
    """Regular expression for the message of the correct refusal."""
    given: Mapping[str, Any]
    """Values that a launcher or user supplies: variables, num_gpus, files and query fields."""
    facts: Mapping[str, Any]
    """Query fields that the file determines, by dotted path."""


def read_list(path: Path = LIST) -> list[PublicFile]:
    """Return the rows of the list."""
    with path.open(encoding="utf-8", newline="") as rows:
        return [
            PublicFile(
                repository=row["repository"],
                ref=row["ref"],
                path=row["path"],
                line=int(row["line"]) if row["line"] else None,
                kind=row["kind"],
                complete=row["complete"] == "yes",
                expected=row["expected"],
                reason=row["reason"],
                given=yaml.safe_load(row["given"] or "{}"),
                facts=yaml.safe_load(row["facts"] or "{}"),
            )
            for row in csv.DictReader(rows)
        ]


def classify(file: PublicFile, text: str, *, folder: Path) -> tuple[str, str]:
    """Return the outcome of importing a file (one of OUTCOMES), and the refusal or the wrong
    fields.
    """
    given = dict(file.given)
    variables, num_gpus = given.pop("variables", {}), given.pop("num_gpus", None)
    files = {
        name: (folder / name).read_text(encoding="utf-8")
        for name in given.pop("files", [])
        if (folder / name).is_file()
    }
    try:
        reading = read_configuration(
            text if file.line is None else code_block(text, file.line),
            num_gpus=num_gpus,
            overrides={"cluster.gpu": "h100-sxm-80gb"} | given,
            variables={name: str(value) for name, value in variables.items()},
            files=files,
        )
        schema.parse_query(reading.query)
    except HpToolError as error:
        true = file.expected == "refused" and re.search(file.reason, error.message)
        return OUTCOMES[1 if true else 2], error.message
    if file.expected == "refused":
        return OUTCOMES[3], "it must be refused"
    wrong = [
        f"{path} is {_value(reading.query, path)!r}, not {value!r}"
        for path, value in file.facts.items()
        if _value(reading.query, path) != value
    ]
    return (OUTCOMES[3], "; ".join(wrong)) if wrong else (OUTCOMES[0], "")


def code_block(text: str, line: int) -> str:
    """Return the code block of a Markdown page that contains a line, counted from 1."""
    lines = text.splitlines()
    marks = [number for number, each in enumerate(lines, 1) if each.startswith("```")]
    opened = max(mark for mark in marks if mark < line)
    closed = min((mark for mark in marks if mark >= line), default=len(lines) + 1)
    return "\n".join(lines[opened : closed - 1]) + "\n"


def _value(query: Mapping[str, Any], dotted: str) -> Any:
    node: Any = query
    for name in dotted.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def main() -> None:
    """Print the outcome of each file, and the number of files with each outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the files as OWNER+NAME/PATH")
    folder = parser.parse_args().folder
    complete: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for file in read_list():
        place = folder / file.repository.replace("/", "+")
        if (place / file.path).is_file():
            text = (place / file.path).read_text(encoding="utf-8")
            result, why = classify(file, text, folder=place)
        else:
            result, why = OUTCOMES[4], ""
        (complete if file.complete else others)[result] += 1
        print(f"{result:28} {'complete' if file.complete else '':8}  {file.repository} {file.path}")
        if why:
            print(f"{'':40}{why[:300]}")
    print(f"\n{'':28}  complete  others")
    for name in OUTCOMES:
        print(f"{name:28}  {complete[name]:8}  {others[name]:6}")


if __name__ == "__main__":
    main()
