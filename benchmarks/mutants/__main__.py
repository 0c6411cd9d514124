"""Count how many randomly drawn faults the tests detect.

`python -m benchmarks.mutants --seed N --count 60 [--kinds factor lock] [-j 2] [--json]`. Locks are
few, so that a draw of all kinds rarely contains one; `--kinds lock` draws only locks. Each mutant
runs in a temporary copy of the working tree, without reference data, with the test files that reach
its function.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from benchmarks.mutants.generate import Kind, Mutant, draw
from benchmarks.mutants.reached import read
from benchmarks.mutants.trial import Copy, Verdict

ROOT = Path(__file__).parents[2]
MIN_KILLED = 50 / 60
KINDS: tuple[Kind, ...] = get_args(Kind)


def run_mutants(
    *,
    seed: int,
    count: int,
    jobs: int,
    kinds: Collection[Kind] = KINDS,
    reached: Path | None = None,
    limit_s: float = math.inf,
) -> list[Verdict]:
    """Return the verdicts in the order of the draw; print the progress to standard error.

    Args:
        seed: Seed of the draw.
        count: Number of mutants.
        jobs: Number of mutants tested at the same time.
        kinds: Kinds of faults to draw.
        reached: File that records which functions the tests reach.
        limit_s: Time limit of the tests of one mutant.
    """
    drawn = draw(ROOT, seed=seed, count=count, kinds=kinds)
    with tempfile.TemporaryDirectory(prefix="hp-mutants-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(copy := Copy.create(ROOT, Path(folder) / str(number)))
        reached = reached or Path(folder) / "reached.json"
        if not reached.exists():
            copy.record(reached, locks=any(mutant.kind == "lock" for mutant in drawn))
        reach = read(reached)

        def judge(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                verdict = copy.judge(mutant, reached=reach, limit_s=limit_s)
            finally:
                copies.put(copy)
            print(as_line(verdict), file=sys.stderr, flush=True)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge, drawn))


def as_line(verdict: Verdict) -> str:
    """Return a line with the place of the fault and the test that detected it."""
    place = f"{verdict.mutant.path}:{verdict.mutant.line}"
    if verdict.killed_by:
        return f"killed    {place} by {verdict.killed_by}"
    return f"SURVIVED  {place}{'' if verdict.reached else ', which no test runs'}\n{verdict.diff}"


def as_text(verdicts: list[Verdict]) -> str:
    """Return the surviving mutants and the number of killed ones as text."""
    survivors = [as_line(verdict) for verdict in verdicts if verdict.killed_by is None]
    return "\n".join(
        [*survivors, f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants killed"]
    )


def as_json(verdicts: list[Verdict], *, seed: int) -> dict[str, Any]:
    """Return the number of killed mutants, and every mutant with its verdict, for --json."""
    mutants = [
        {
            **asdict(verdict.mutant),
            "diff": verdict.diff,
            "killed_by": verdict.killed_by,
            "reached": verdict.reached,
        }
        for verdict in verdicts
    ]
    return {
        "seed": seed,
        "killed": sum(verdict.killed_by is not None for verdict in verdicts),
        "mutants": mutants,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="number of mutants to draw")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        help="kinds of faults to draw (default: all)",
    )
    parser.add_argument(
        "-j", "--jobs", type=int, default=2, help="number of mutants tested at the same time"
    )
    parser.add_argument(
        "--reached",
        type=Path,
        help="file that records which functions each test file reaches; reused if it exists",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="time limit of the tests of one mutant, which counts as survived after it",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    verdicts = run_mutants(
        seed=arguments.seed,
        count=arguments.count,
        jobs=arguments.jobs,
        kinds=arguments.kinds,
        reached=arguments.reached,
        limit_s=arguments.limit,
    )
    print(
        json.dumps(as_json(verdicts, seed=arguments.seed), indent=2)
        if arguments.json
        else as_text(verdicts)
    )
    killed = sum(verdict.killed_by is not None for verdict in verdicts)
    sys.exit(killed < MIN_KILLED * len(verdicts))


if __name__ == "__main__":
    main()
