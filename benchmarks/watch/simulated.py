"""Simulated step times: published noise (heavy tails, stalls, checkpoints), and noise that
remembers, follows the load of a day or stops for evaluation.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hp_tool.loop.assumptions import assumed

Floats = npt.NDArray[np.float64]
NOISE = 0.03
"""Robust standard deviation of ln step time."""
SHAPE = 0.25
"""Of the generalized extreme value distribution, which the slowest of many parallel tasks follows
(arXiv 1611.04167).
"""
STALLED = 0.01
"""Share of single steps that stall, by an exponential excess of ln time as runs of published grids
do (`assumptions.yaml`).
"""
PERIODS = (20, 50, 100, 500)
"""Steps between checkpoints."""
CHECKPOINT = (1.0, 10.0)
"""Step times that one takes: 20 to 200 s of steps of 20 s, as arXiv 2104.04473 saves a trillion
parameters in 49 s.
"""
CORRELATION = 0.9
"""Of consecutive steps of an AR(1) job: its memory is 10 steps."""
WAVE, DAY = 0.03, 4320
"""Amplitude of ln step time over a day, and steps of 20 s in one."""
EVALUATIONS = (100, 250, 500, 1000)
"""Steps between evaluations."""
PAUSED_STEPS = (1, 12)
"""Steps that an evaluation slows, at least and at most."""
PAUSE = (1.5, 5.0)
"""Times as long as these steps take."""


def step_times(rng: np.random.Generator, *, steps: int, noise: float = NOISE) -> Floats:
    """Return seconds of `steps` steps of one job, whose median is 1."""

    def quantile(share: npt.ArrayLike) -> Floats:
        return ((-np.log(share)) ** -SHAPE - 1.0) / SHAPE

    scale = noise * 1.349 / float(quantile(0.75) - quantile(0.25))
    logs = (quantile(rng.uniform(1e-12, 1.0, steps)) - quantile(0.5)) * scale
    logs += np.where(
        rng.random(steps) < STALLED, rng.exponential(assumed().stalls.mean_log_excess, steps), 0.0
    )
    return with_checkpoints(np.exp(logs), rng)


def with_checkpoints(times: Floats, rng: np.random.Generator) -> Floats:
    """Lengthen every so manieth step by a checkpoint, from the first ones on."""
    period = int(rng.choice(PERIODS))
    saves = (np.arange(len(times)) + rng.integers(period)) % period == 0
    times[saves] += rng.uniform(*CHECKPOINT)
    return times


def remembering(rng: np.random.Generator, *, steps: int) -> Floats:
    """Return step times whose ln is an AR(1) process of standard deviation NOISE, with
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
    """Lengthen some steps in a row by an evaluation, again and again."""
    period, length = (
        int(rng.choice(EVALUATIONS)),
        int(rng.integers(PAUSED_STEPS[0], PAUSED_STEPS[1] + 1)),
    )
    paused = (np.arange(len(times)) + rng.integers(period)) % period < length
    times[paused] *= rng.uniform(*PAUSE)
    return times


def everything(rng: np.random.Generator, *, steps: int) -> Floats:
    """Return step times with noise that remembers, a daily wave, checkpoints and pauses."""
    return with_pauses(remembering(rng, steps=steps) * _wave(rng, steps), rng)


def _wave(rng: np.random.Generator, steps: int) -> Floats:
    return np.asarray(np.exp(WAVE * np.sin(2.0 * np.pi * (np.arange(steps) / DAY + rng.random()))))


KINDS: dict[str, Callable[..., Floats]] = {
    "published": step_times,
    "AR(1)": remembering,
    "daily wave": waves,
    "evaluation pauses": pauses,
    "all of these": everything,
}
"""Jobs by the kind of their noise."""


def sudden(times: Floats, after: int, *, by: float = 0.1) -> None:
    """Make all steps from `after` on slower."""
    times[after:] *= 1.0 + by


def every_tenth(times: Floats, after: int) -> None:
    """Make every tenth step four times slower, which costs 30 % of a step in the mean."""
    times[after::10] *= 4.0


def creep(times: Floats, after: int) -> None:
    """Make steps slower little by little, by 20 % over 500 steps."""
    times[after:] *= 1.0 + 0.2 * np.minimum(np.arange(len(times) - after) / 500.0, 1.0)


def bursts(times: Floats, after: int) -> None:
    """Make 30 of every 200 steps slower by 30 %."""
    times[after:] *= np.where(np.arange(len(times) - after) % BURST_PERIOD < BURST, 1.3, 1.0)


BURST, BURST_PERIOD = 30, 200
FAULTS: dict[str, tuple[Callable[[Floats, int], None], int]] = {
    "10 % slower": (sudden, 20),
    "every tenth step 4 times slower": (every_tenth, 100),
    "20 % slower over 500 steps": (creep, 400),
    "30 of 200 steps 30 % slower": (bursts, BURST_PERIOD + BURST),
}
"""What makes a job slower, and the steps within which that is to be told."""
