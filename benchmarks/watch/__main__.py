"""`python -m benchmarks.watch [--jobs N] [--processes N]`: simulate N jobs of each kind of noise.
Print how many slowdowns are reported in time and too early, and the false alarms of N steady jobs
of 10,000 steps.
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
"""Steps before a sudden slowdown of a job with published noise."""
LATER, BEYOND = 500, 700
"""Steps before, and after the start of, a slowdown of a job with another kind of noise."""


def delays(
    *,
    jobs: int,
    after: int,
    kind: str = "published",
    plant: Callable[..., None] = sudden,
    beyond: int = 200,
) -> list[int | None]:
    """Return the number of steps from the slowdown to each job's alarm: 1 for the first slow step,
    below 1 for a false alarm before it, and None without an alarm within `beyond` steps. Alarms
    that a job became faster are ignored.
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
    """Return the number of alarms of a steady job, for slower and faster steps together."""
    return len(
        Changes().add(KINDS[kind](np.random.default_rng(1_000_000 + seed), steps=steps).tolist())
    )


def false_alarms(*, jobs: int, steps: int = LENGTH, kind: str = "published") -> int:
    """Return the number of alarms of steady jobs, for slower and faster steps together."""
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
