"""`python -m benchmarks.mutants --seed N --count 60 [--kinds factor lock] [-j 2] [--json]`: how
many faults drawn by a seed the tests see. Locks are few, so that a draw of all kinds seldom has
one: `--kinds lock` draws them alone.

Each mutant runs in a temporary copy of the working tree, without reference data, under the test
files that reach its function.
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


def evaluate(
    *,
    seed: int,
    count: int,
    jobs: int,
    kinds: Collection[Kind] = KINDS,
    reached: Path | None = None,
    limit_s: float = math.inf,
) -> list[Verdict]:
    """Return the verdicts in the order of the draw; progress goes to standard error.

    `reached`: where to keep what tests reach; `limit_s`: of tests run on one mutant.
    """
    drawn = draw(ROOT, seed=seed, count=count, kinds=kinds)
    with tempfile.TemporaryDirectory(prefix="hp-mutants-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(copy := Copy.of(ROOT, Path(folder) / str(number)))
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
    """Where the fault stood and which test saw it."""
    place = f"{verdict.mutant.path}:{verdict.mutant.line}"
    if verdict.killed_by:
        return f"killed    {place} by {verdict.killed_by}"
    return f"SURVIVED  {place}{'' if verdict.reached else ', which no test runs'}\n{verdict.diff}"


def as_text(verdicts: list[Verdict]) -> str:
    """The survivors and the count."""
    survivors = [as_line(verdict) for verdict in verdicts if verdict.killed_by is None]
    return "\n".join(
        [*survivors, f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants killed"]
    )


def as_json(verdicts: list[Verdict], *, seed: int) -> dict[str, Any]:
    """Return the count of killed mutants and every mutant with its verdict, for --json."""
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
    parser.add_argument("--count", type=int, default=60, help="mutants to draw")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what to draw (default: all)"
    )
    parser.add_argument("-j", "--jobs", type=int, default=2, help="mutants tested at a time")
    parser.add_argument(
        "--reached",
        type=Path,
        help="keep here which functions each test file reaches; reused where it exists",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="of tests run for one mutant: unseen then, it survived",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    verdicts = evaluate(
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
