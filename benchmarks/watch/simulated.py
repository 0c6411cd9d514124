"""Step times with the spread of published jobs: heavy tails, stalls, checkpoints that come again and again."""

import numpy as np
import numpy.typing as npt

from hp_tool.assumptions import assumed

NOISE = 0.03
"""Robust standard deviation of ln step time."""
SHAPE = 0.25
"""Of the generalized extreme value distribution, which the slowest of many parallel tasks follows (arXiv 1611.04167)."""
STALLED = 0.01
"""Share of single steps that stall, by an exponential excess of ln time as runs of published grids do (`assumptions.yaml`)."""
PERIODS = (20, 50, 100, 500)
"""Steps between checkpoints."""
CHECKPOINT = (1.0, 10.0)
"""Step times that one takes: 20 to 200 s of steps of 20 s, as arXiv 2104.04473 saves a trillion parameters in 49 s."""


def step_times(rng: np.random.Generator, *, steps: int, noise: float = NOISE) -> npt.NDArray[np.float64]:
    """Seconds of `steps` steps of one job, whose median is 1."""

    def quantile(share: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return ((-np.log(share)) ** -SHAPE - 1.0) / SHAPE

    scale = noise * 1.349 / float(quantile(0.75) - quantile(0.25))
    logs = (quantile(rng.uniform(1e-12, 1.0, steps)) - quantile(0.5)) * scale
    logs += np.where(rng.random(steps) < STALLED, rng.exponential(assumed().stalls.mean_log_excess, steps), 0.0)
    times = np.exp(logs)
    period = int(rng.choice(PERIODS))
    saves = (np.arange(steps) + rng.integers(period)) % period == 0
    times[saves] += rng.uniform(*CHECKPOINT)
    return times
