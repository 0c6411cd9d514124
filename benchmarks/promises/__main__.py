"""Check all guarantees in simulated histories.

`python -m benchmarks.promises [--histories 100000] [--processes 2] [--seed 0]`. If a history breaks
a guarantee, the command prints the shortest such history and exits with 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback

from tests.promises.machine import Histories, histories

AT_A_TIME = 500
"""Number of histories per seed."""


def run_histories(seed: int, number: int) -> tuple[int, str]:
    """Return the number of histories, and the broken guarantee; empty if none was broken."""
    Histories.count = 0
    try:
        histories(number, seed=seed)
    except Exception:
        return Histories.count, traceback.format_exc()
    return Histories.count, ""


def main() -> None:
    """Run the histories, and print the progress."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description=__doc__)
    parser.add_argument("--histories", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the first 500 histories; each further 500 use the next seed",
    )
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + -(-arguments.histories // AT_A_TIME))
    tasks = [(seed, min(AT_A_TIME, arguments.histories)) for seed in seeds]
    started, total = time.monotonic(), 0
    with multiprocessing.Pool(arguments.processes) as pool:
        for (seed, _), (count, breach) in zip(tasks, pool.imap(_chunk, tasks), strict=True):
            total += count
            if breach:
                sys.exit(
                    f"a promise is broken with seed {seed}, after {total} histories:\n{breach}"
                )
            minutes = (time.monotonic() - started) / 60
            sys.stderr.write(f"{total} histories, {total / minutes:.0f} a minute\n")
    print(
        f"{total} histories without a broken promise in {(time.monotonic() - started) / 60:.1f} "
        "minutes"
    )


def _chunk(task: tuple[int, int]) -> tuple[int, str]:
    return run_histories(*task)


if __name__ == "__main__":
    main()
