"""`python -m benchmarks.watch [--jobs N] [--processes N]`: of N jobs of each noise that become
slower, how many are told in time, how many too early; and false alarms of N jobs of 10,000 steps
that do not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from benchmarks.watch.simulated import FAULTS, KINDS, sudden
from hp_tool.watch.slowdowns.changes import Changes

WITHIN, LENGTH = 20, 10_000
AFTER = (100, 200, 500, 2000)
"""Steps before a sudden slowdown of published noise."""
LATER, BEYOND = 500, 700
"""Steps before a slowdown of other noise, and steps that follow it."""


def delays(
    *,
    jobs: int,
    after: int,
    kind: str = "published",
    plant: Callable[..., None] = sudden,
    beyond: int = 200,
) -> list[int | None]:
    """Return steps from the slowdown to the alarm of each job, 1 for its first step; below 1 for
    one that came too early, None for none within `beyond` steps. A job that becomes faster is not
    told.
    """
    return [
        _delay(seed, after=after, kind=kind, plant=plant, beyond=beyond) for seed in range(jobs)
    ]


def _delay(
    seed: int, *, after: int, kind: str, plant: Callable[..., None], beyond: int
) -> int | None:
    times = KINDS[kind](np.random.default_rng(seed), steps=after + beyond)
    plant(times, after)
    changes = Changes()
    for number, each in enumerate(times, start=1):
        if changes.add([each]) and changes.kind != "faster":
            return number - after
    return None


def alarms(seed: int, *, kind: str = "published", steps: int = LENGTH) -> int:
    """Return the alarms of a clean job, slower and faster together."""
    return len(
        Changes().add(KINDS[kind](np.random.default_rng(1_000_000 + seed), steps=steps).tolist())
    )


def false_alarms(*, jobs: int, steps: int = LENGTH, kind: str = "published") -> int:
    """Return the alarms of clean jobs, slower and faster together."""
    return sum(alarms(seed, kind=kind, steps=steps) for seed in range(jobs))


def _row(name: str, waits: list[int | None], within: int) -> str:
    early = sum(each is not None and each < 1 for each in waits)
    soon = sum(each is not None and 1 <= each <= within for each in waits)
    median = sorted(each or 9999 for each in waits)[len(waits) // 2]
    return (
        f"{name}: {soon} of {len(waits)} told within {within} steps, {early} too early; median "
        f"{median} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        for after in AFTER:
            waits = list(
                pool.map(
                    partial(_delay, after=after, kind="published", plant=sudden, beyond=200),
                    range(options.jobs),
                )
            )
            print(_row(f"10 % slower after {after:,} steps", waits, WITHIN), flush=True)
        for kind in KINDS:
            for fault, (plant, within) in FAULTS.items():
                one = partial(_delay, after=LATER, kind=kind, plant=plant, beyond=BEYOND)
                print(
                    _row(f"{kind}, {fault}", list(pool.map(one, range(options.jobs))), within),
                    flush=True,
                )
        for kind in KINDS:
            begun = time.perf_counter()
            counts = list(pool.map(partial(alarms, kind=kind), range(options.jobs)))
            spent = time.perf_counter() - begun
            per_step = 1e6 * spent * options.processes / len(counts) / LENGTH
            wrong = sum(each > 0 for each in counts)
            print(
                f"{kind}: {wrong} of {len(counts)} clean jobs with a false alarm; {per_step:.0f} "
                "us a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
