"""Console blocks of the documentation: what a page's commands print, beside what the page shows
below them.

`python -m tests.console` writes what the commands print now into the pages. It keeps which lines a
page shows.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^ *```console\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```(?:yaml|bash)\n(# (\S+\.(?:yaml|sh))\b.*?)^```", re.DOTALL | re.MULTILINE)
"""A block whose first line names the file that the page's commands read."""
RUN = (
    "echo",
    *(
        f"hp-tool {name}"
        for name in ("estimate", "recommend", "size", "import", "export", "calibrate", "watch")
    ),
)
"""Commands that a test runs: they neither serve nor start real runs, and read nothing that the page
does not have.
"""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
ELLIPSIS = "..."
ERROR = "hp-tool: "
PIECE = re.compile(rf"{NUMBER.pattern}|\.\.\.|\s+|.")
VARIES = re.compile(r"(?<=ranked in ).*")


@dataclass(kw_only=True)
class Shown:
    """A command, and the lines that the page shows below it."""

    command: str
    lines: list[str] = field(default_factory=list)


def shown(page: str) -> list[Shown]:
    """Return the commands of the page's console blocks that a test runs, in their order."""
    commands: list[Shown] = []
    for block in BLOCK.findall(page):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip().startswith("$ "):
                commands.append(Shown(command=line.strip().removeprefix("$ ").partition(" #")[0]))
            elif line.strip() not in ("", ELLIPSIS):
                commands[-1].lines.append(line.strip())
    return [each for each in commands if each.command.startswith(RUN)]


def run_page(page: str, folder: Path) -> Iterator[tuple[Shown, list[str]]]:
    """Yield the page's commands with the lines that each prints, run in `folder` one after another.

    The folder gets the examples, the page's files and, if the page calibrates, a database. `> FILE`
    writes a file.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    for content, name in FILE.findall(page):
        (folder / name).write_text(content, encoding="utf-8")
    surroundings = (
        {"HP_DATABASE_URL": f"sqlite:///{folder / 'measured.sqlite'}"}
        if "hp-tool calibrate" in page
        else {}
    )
    for each in shown(page):
        command, _, target = each.command.partition(" > ")
        words = shlex.split(command)
        printed, messages = (
            (f"{words[1]}\n", "")
            if words[0] == "echo"
            else _run(words, folder=folder, surroundings=surroundings)
        )
        if messages and not printed and ERROR not in "".join(each.lines):
            raise RuntimeError(f"{command}: {messages}")
        if target:
            (folder / target.strip()).write_text(printed, encoding="utf-8")
        yield each, [line.strip() for line in (printed + messages).splitlines()]


def _run(words: Sequence[str], *, folder: Path, surroundings: Mapping[str, str]) -> tuple[str, str]:
    """Return what the command prints, and what it says on standard error."""
    from hp_tool.cli.main import main

    with (
        chdir(folder),
        patch.dict(os.environ, surroundings),
        patch.object(sys, "argv", list(words)),
        redirect_stdout(io.StringIO()) as output,
        redirect_stderr(io.StringIO()) as messages,
        suppress(SystemExit),
    ):
        main()
    return output.getvalue(), messages.getvalue()


def is_among(line: str, printed: Sequence[str]) -> bool:
    """Return whether a printed line is the page's, where `...` stands for anything and a run of
    spaces for any other.
    """
    return any(_pattern(line).fullmatch(each) for each in printed)


def _pattern(line: str, *, number: str | None = None) -> re.Pattern[str]:
    """`number`: what stands for each number; None: the number itself."""

    def piece(match: re.Match[str]) -> str:
        text = match[0]
        if text == ELLIPSIS:
            return ".*?"
        if text.isspace():
            return r"\s+"
        return number if number is not None and NUMBER.fullmatch(text) else re.escape(text)

    return re.compile(PIECE.sub(piece, VARIES.sub(ELLIPSIS, line)))


def refreshed(page: str, folder: Path) -> str:
    """Return the page with the numbers that its commands print now."""
    for each, printed in run_page(page, folder):
        left = list(printed)
        for line in each.lines:
            alike = [
                other
                for other in left
                if _pattern(line, number=f"({NUMBER.pattern})").fullmatch(other)
            ]
            if alike and not is_among(line, alike):
                left.remove(alike[0])
                page = page.replace(line, _renumbered(line, alike[0]), 1)
    return page


def _renumbered(line: str, printed: str) -> str:
    """Return the page's line with the numbers of the printed one, each ending in the old one's
    column where spaces allow it.
    """
    match = _pattern(line, number=f"({NUMBER.pattern})").fullmatch(printed)
    new = ""
    place = 0
    for old, number in zip(
        NUMBER.finditer(VARIES.sub("", line)), match.groups() if match else (), strict=True
    ):
        between = line[place : old.start()]
        spare = len(between) - len(between.rstrip(" ")) - 1
        longer = len(new) + len(between) + len(number) - old.end()
        between = (
            between[: len(between) - min(longer, spare)] if longer > 0 and spare > 0 else between
        )
        between += " " * -longer if longer < 0 and spare > 0 else ""
        new += between + number
        place = old.end()
    return new + line[place:]


if __name__ == "__main__":
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if shown(text):
            with tempfile.TemporaryDirectory() as temporary:
                path.write_text(refreshed(text, Path(temporary)), encoding="utf-8")
