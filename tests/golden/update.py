"""`python -m tests.golden.update`: store today's predictions, provided that CHANGELOG.md says which
moved.

Prints what moved most since HEAD. If anything did and the changelog's section "Predictions that
moved" is still HEAD's, nothing is written and the exit status is 1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.golden import compare, compute

REPOSITORY = Path(__file__).parents[2]
HEADING = "### Predictions that moved"
PRINTED = 20


def update(*, repository: Path = REPOSITORY) -> int:
    """The exit status of the command."""
    answers = compare.normal(compute.answers())
    folder = compare.STORED.relative_to(REPOSITORY)
    committed = _at_head(repository, "ls-tree", "--name-only", "HEAD", f"{folder}/").split()
    before = compare.load(
        line
        for path in committed
        for line in _at_head(repository, "show", f"HEAD:{path}").splitlines()
    )
    moved = compare.differences(before, answers)
    for each in moved[:PRINTED]:
        print(each)
    print(
        f"{len(moved)} values in {len({'/'.join(each.place.split('/')[:2]) for each in moved})} "
        "answers moved"
    )
    told = moved_section((repository / "CHANGELOG.md").read_text())
    if moved and told == moved_section(_at_head(repository, "show", "HEAD:CHANGELOG.md")):
        sys.stderr.write(
            f'nothing written: CHANGELOG.md has nothing new under "{HEADING}"; say what moved, how '
            "much and why\n"
        )
        return 1
    (repository / folder).mkdir(exist_ok=True)
    for name, text in compare.files(answers).items():
        (repository / folder / name).write_text(text)
    return 0


def moved_section(changelog: str) -> str:
    """What the newest version's "Predictions that moved" says; empty where it has none."""
    newest = changelog.split("\n## ")[1]
    return newest.partition(f"{HEADING}\n")[2].partition("\n### ")[0].strip()


def _at_head(repository: Path, *arguments: str) -> str:
    return subprocess.run(
        ("git", *arguments), cwd=repository, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(update())
