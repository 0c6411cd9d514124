"""Compare this tree's predictions with those of a commit, bit by bit on this machine.

`python scripts/same_predictions.py COMMIT` answers all golden queries (tests/golden) with both
trees. The exit code is 0 if all values are equal, and 1 if some differ, which are printed with the
largest relative difference first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.golden import compare  # noqa: E402

PRINTED = 50


def main(commit: str) -> int:
    """Return the exit status of the command."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tree = Path(folder) / "tree"
        subprocess.run(
            ("git", "worktree", "add", "--quiet", "--detach", str(tree), commit),
            cwd=REPOSITORY,
            check=True,
            stdout=sys.stderr,
        )
        stack.callback(
            subprocess.run,
            ("git", "worktree", "remove", "--force", str(tree)),
            cwd=REPOSITORY,
            check=True,
        )
        outputs = [
            stack.enter_context((Path(folder) / name).open("w+")) for name in ("before", "after")
        ]
        running = [_answering(tree, outputs[0]), _answering(REPOSITORY, outputs[1])]
        if sum(process.wait() for process in running):  # waits for both processes
            return 2
        before, after = (compare.load(_lines(output)) for output in outputs)
    moved = compare.differences(before, after, exact=True)
    for each in moved[:PRINTED]:
        print(each)
    print(f"{len(before)} answers, {len(moved)} values differ from {commit}'s")
    return 1 if moved or not before else 0


def _answering(tree: Path, output: IO[str]) -> subprocess.Popen[bytes]:
    """Start a process that writes the answers of this tree to the golden queries."""
    command = (sys.executable, str(REPOSITORY / "tests" / "golden" / "compute.py"))
    return subprocess.Popen(
        command, stdout=output, env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree
    )


def _lines(output: IO[str]) -> list[str]:
    output.seek(0)
    return output.readlines()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    sys.exit(main(parser.parse_args().commit))
