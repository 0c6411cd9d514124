"""Run an agent on the evals of the skill.

`python -m benchmarks.skill --agent "claude -p" [--only 1 2] [--save FOLDER]`. The agent's command
receives each prompt as its last argument and prints its answer. The agent must have the skill and
the tools of `hp-tool mcp`. This command checks the regular expressions of an eval and prints its
assertions for a reader.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.skill import evals

TIMEOUT_S = 900.0


def main() -> None:
    """Run the agent; exit with 1 if an answer fails an eval."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.skill", description=__doc__)
    parser.add_argument("--agent", required=True, help="command; the prompt is appended")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of evals")
    parser.add_argument("--save", type=Path, help="folder for the answers")
    given = parser.parse_args()
    chosen = [each for each in evals.read_evals() if given.only is None or each.id in given.only]
    failed = 0
    for task in chosen:
        done = subprocess.run(
            [*shlex.split(given.agent), task.prompt],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if given.save is not None:
            given.save.mkdir(parents=True, exist_ok=True)
            (given.save / f"{task.id}.txt").write_text(done.stdout, encoding="utf-8")
        lacking = task.unmatched(done.stdout) if done.returncode == 0 else [done.stderr.strip()]
        failed += bool(lacking)
        print(f"{task.id}: {'lacks ' + ', '.join(lacking) if lacking else 'passed'}")
        for assertion in task.assertions:
            print(f"   check: {assertion}")
    print(f"{len(chosen) - failed} of {len(chosen)} passed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
