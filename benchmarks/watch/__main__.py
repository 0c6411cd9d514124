"""`python -m benchmarks.watch [--jobs N]`: of N jobs that become 10 % slower, how many are told within 20 steps, how many too
early; and false alarms of N jobs of 10,000 steps that do not."""

from __future__ import annotations

import argparse
import time
from itertools import count

import numpy as np

from benchmarks.watch.simulated import step_times
from hp_tool.slowdowns.changes import Changes

SLOWDOWN, WITHIN, LENGTH = 1.1, 20, 10_000
AFTER = (100, 200, 500, 2000)
"""Steps before the slowdown."""


def delays(*, jobs: int, after: int, slowdown: float = SLOWDOWN) -> list[int | None]:
    """Steps from the slowdown to the alarm of each job, 1 for its first step; below 1 for one that came too early, None for
    none within 200 steps."""
    waits: list[int | None] = []
    for seed in range(jobs):
        times = step_times(np.random.default_rng(seed), steps=after + 200)
        times[after:] *= slowdown
        changes = Changes()
        waits.append(next((number - after for number, each in zip(count(1), times, strict=False) if changes.add([each])), None))
    return waits


def false_alarms(*, jobs: int, steps: int = LENGTH) -> int:
    """Alarms of clean jobs, slower and faster together."""
    rngs = (np.random.default_rng(1_000_000 + seed) for seed in range(jobs))
    return sum(len(Changes().add(step_times(rng, steps=steps).tolist())) for rng in rngs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    jobs = parser.parse_args().jobs
    for after in AFTER:
        waits = delays(jobs=jobs, after=after)
        early = sum(each is not None and each < 1 for each in waits)
        soon = sum(each is not None and 1 <= each <= WITHIN for each in waits)
        print(f"slower by 10 % after {after:5,} steps: {soon} of {jobs} told within {WITHIN}, {early} too early; "
              f"median {sorted(each or 999 for each in waits)[jobs // 2]} steps")  # fmt: skip
    begun = time.process_time()
    alarms = false_alarms(jobs=jobs)
    spent = time.process_time() - begun
    print(f"{jobs} clean jobs of {LENGTH:,} steps: {alarms} false alarms; {1e6 * spent / jobs / LENGTH:.1f} us a step")


if __name__ == "__main__":
    main()
