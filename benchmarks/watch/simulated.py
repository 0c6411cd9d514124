"""Simulate step times with published noise (heavy tails, stalls, checkpoints), correlated noise,
daily load, or pauses for evaluation.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hp_tool.loop.assumptions import assumed

Floats = npt.NDArray[np.float64]
NOISE = 0.03
"""Robust standard deviation of ln(step time)."""
SHAPE = 0.25
"""Shape parameter of the generalized extreme value distribution of the slowest of many parallel
tasks (arXiv 1611.04167).
"""
STALLED = 0.01
"""Fraction of single steps that stall, with an exponential excess of ln(time) as in published grids
(`assumptions.yaml`).
"""
PERIODS = (20, 50, 100, 500)
"""Steps between checkpoints."""
CHECKPOINT = (1.0, 10.0)
"""Length of a checkpoint in step times: 20 to 200 s for steps of 20 s. arXiv 2104.04473 saves a
trillion parameters in 49 s.
"""
CORRELATION = 0.9
"""Correlation of consecutive steps of an AR(1) job, which decays over 10 steps."""
WAVE, DAY = 0.03, 4320
"""Amplitude of ln(step time) over a day, and number of 20-second steps in a day."""
EVALUATIONS = (100, 250, 500, 1000)
"""Steps between evaluations."""
PAUSED_STEPS = (1, 12)
"""Minimum and maximum number of steps that an evaluation slows."""
PAUSE = (1.5, 5.0)
"""Slowdown of these steps."""


def step_times(rng: np.random.Generator, *, steps: int, noise: float = NOISE) -> Floats:
    """Return the seconds of `steps` steps of one job; their median is 1."""

    def quantile(share: npt.ArrayLike) -> Floats:
        return ((-np.log(share)) ** -SHAPE - 1.0) / SHAPE

    scale = noise * 1.349 / float(quantile(0.75) - quantile(0.25))
    logs = (quantile(rng.uniform(1e-12, 1.0, steps)) - quantile(0.5)) * scale
    logs += np.where(
        rng.random(steps) < STALLED, rng.exponential(assumed().stalls.mean_log_excess, steps), 0.0
    )
    return with_checkpoints(np.exp(logs), rng)


def with_checkpoints(times: Floats, rng: np.random.Generator) -> Floats:
    """Lengthen one step per period by a checkpoint."""
    period = int(rng.choice(PERIODS))
    saves = (np.arange(len(times)) + rng.integers(period)) % period == 0
    times[saves] += rng.uniform(*CHECKPOINT)
    return times


def correlated(rng: np.random.Generator, *, steps: int) -> Floats:
    """Return step times whose logarithm is an AR(1) process with standard deviation NOISE, with
    checkpoints.
    """
    shocks = rng.normal(0.0, NOISE * np.sqrt(1.0 - CORRELATION**2), steps)
    logs = np.empty(steps)
    last = rng.normal(0.0, NOISE)
    for number, shock in enumerate(shocks):
        logs[number] = last = CORRELATION * last + shock
    return with_checkpoints(np.exp(logs), rng)


def waves(rng: np.random.Generator, *, steps: int) -> Floats:
    """Return published step times that rise and fall with the load of a day."""
    return step_times(rng, steps=steps) * _wave(rng, steps)


def pauses(rng: np.random.Generator, *, steps: int) -> Floats:
    """Return published step times with pauses for evaluation."""
    return with_pauses(step_times(rng, steps=steps), rng)


def with_pauses(times: Floats, rng: np.random.Generator) -> Floats:
    """Lengthen several consecutive steps by an evaluation, periodically."""
    period, length = (
        int(rng.choice(EVALUATIONS)),
        int(rng.integers(PAUSED_STEPS[0], PAUSED_STEPS[1] + 1)),
    )
    paused = (np.arange(len(times)) + rng.integers(period)) % period < length
    times[paused] *= rng.uniform(*PAUSE)
    return times


def all_noise(rng: np.random.Generator, *, steps: int) -> Floats:
    """Return step times with correlated noise, daily load, checkpoints and pauses."""
    return with_pauses(correlated(rng, steps=steps) * _wave(rng, steps), rng)


def _wave(rng: np.random.Generator, steps: int) -> Floats:
    return np.asarray(np.exp(WAVE * np.sin(2.0 * np.pi * (np.arange(steps) / DAY + rng.random()))))


KINDS: dict[str, Callable[..., Floats]] = {
    "published": step_times,
    "AR(1)": correlated,
    "daily wave": waves,
    "evaluation pauses": pauses,
    "all of these": all_noise,
}
"""Functions that simulate a job, by kind of noise."""


def sudden(times: Floats, after: int, *, by: float = 0.1) -> None:
    """Slow all steps from `after` on."""
    times[after:] *= 1.0 + by


def every_tenth(times: Floats, after: int) -> None:
    """Make every tenth step four times slower, which lengthens the mean step by 30%."""
    times[after::10] *= 4.0


def creep(times: Floats, after: int) -> None:
    """Slow the steps gradually, by 20% over 500 steps."""
    times[after:] *= 1.0 + 0.2 * np.minimum(np.arange(len(times) - after) / 500.0, 1.0)


def bursts(times: Floats, after: int) -> None:
    """Slow 30 of every 200 steps by 30%."""
    times[after:] *= np.where(np.arange(len(times) - after) % BURST_PERIOD < BURST, 1.3, 1.0)


BURST, BURST_PERIOD = 30, 200
FAULTS: dict[str, tuple[Callable[[Floats, int], None], int]] = {
    "10 % slower": (sudden, 20),
    "every tenth step 4 times slower": (every_tenth, 100),
    "20 % slower over 500 steps": (creep, 400),
    "30 of 200 steps 30 % slower": (bursts, BURST_PERIOD + BURST),
}
"""Functions that slow a job, and the number of steps within which the slowdown should be reported.
"""
