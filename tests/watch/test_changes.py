"""The detector of changes: soon enough, never too early, in bounded memory, and the same after a
restart.
"""

import json
import math

import numpy as np
import pytest

from benchmarks.watch.__main__ import WITHIN, delays, false_alarms
from benchmarks.watch.simulated import step_times
from hp_tool.loop.assumptions import assumed
from hp_tool.watch.slowdowns.changes import Changes, shift_sds
from hp_tool.watch.slowdowns.noise import Noise, t_quantile


def detector() -> Changes:
    return Changes()


def test_a_slowdown_of_ten_percent_is_told_within_twenty_steps_and_never_before() -> None:
    waits = delays(jobs=40, after=200)
    assert all(each is not None and each >= 1 for each in waits)
    assert sum(each is not None and each <= WITHIN for each in waits) >= 38


def test_clean_jobs_raise_no_alarm() -> None:
    assert false_alarms(jobs=5) == 0


@pytest.mark.long
def test_a_hundred_clean_jobs_raise_at_most_one_alarm() -> None:
    assert false_alarms(jobs=100) <= 1


def test_slow_steps_that_come_in_rows_are_the_job_s_own_way() -> None:
    """A CPU that others use: half of the time every step takes 8% longer, for five steps on
    average.
    """
    rng = np.random.default_rng(0)
    slow, times = False, []
    for noise in rng.normal(0.0, 0.01, 5000):
        slow = slow if rng.random() < 0.8 else not slow
        times.append(math.exp(noise) * (1.08 if slow else 1.0))
    assert detector().add(times) == []


def ar1(rng: np.random.Generator, *, steps: int, correlation: float) -> np.ndarray:
    """Return an AR(1) process of standard deviation 1."""
    shocks, logs = rng.normal(0.0, math.sqrt(1 - correlation**2), steps), np.zeros(steps)
    logs[0] = rng.normal()
    for step in range(1, steps):
        logs[step] = correlation * logs[step - 1] + shocks[step]
    return logs


def test_noise_is_estimated_beside_outliers_and_a_trend() -> None:
    logs = 0.03 * ar1(np.random.default_rng(0), steps=20_000, correlation=0.9) + np.linspace(
        0.0, 0.2, 20_000
    )
    logs[::50] += 2.0
    noise = Noise.of(logs.tolist())
    assert noise.shock_sd == pytest.approx(0.03 * math.sqrt(1 - 0.9**2), rel=0.02)
    assert (
        noise.correlation == pytest.approx(0.9, abs=0.01)
        and noise.correlation < noise.correlation_bound < 0.92
    )


def test_the_shift_is_the_generalized_least_squares_estimate() -> None:
    """Solved with the covariance matrix, for a job with one outlier before the shift and one after
    it.
    """
    noise, n, before = Noise(shock_sd=0.01, correlation=0.8, steps=10**9), 20, 2
    logs = 0.0167 * ar1(np.random.default_rng(1), steps=before + n, correlation=0.8)
    logs[before:] += 0.05
    logs[[1, 9]] = 3.0
    sds = shift_sds(logs.tolist(), n, limit=1.0, noise=noise, reference_steps=10**9)
    kept = np.array([0, *(place for place in range(before, before + n) if place != 9)])
    covariance = noise.sd**2 * 0.8 ** np.abs(kept[:, None] - kept[None, :])
    shifted, inverse = (kept >= before).astype(float), np.linalg.inv(covariance)
    information = shifted @ inverse @ shifted
    assert sds == pytest.approx(shifted @ inverse @ logs[kept] / math.sqrt(information), rel=1e-3)


def test_steps_that_are_all_outliers_tell_no_shift() -> None:
    noise = Noise(shock_sd=0.1, correlation=0.05, steps=119)
    logs = [0.0] * 20 + [3.0] * 8
    assert shift_sds(logs, 8, limit=0.9, noise=noise, reference_steps=128) == 0.0


def test_the_median_of_steps_has_its_known_deviation() -> None:
    independent = Noise(shock_sd=0.03, correlation=0.0, steps=1000)
    assert independent.drift_sd(100, 100) == pytest.approx(0.03 * math.sqrt(2 * math.pi / 2 / 100))
    rng = np.random.default_rng(0)
    simulated = np.std([np.median(ar1(rng, steps=100, correlation=0.9)) for _ in range(3000)])
    remembering = Noise(shock_sd=math.sqrt(1 - 0.9**2), correlation=0.9, steps=1000)
    assert remembering.drift_sd(100, 10**9) == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize(
    ("steps", "probability", "quantile"),
    [(26, 1e-5, 5.197), (100, 1e-7, 5.587), (10**6, 1e-7, 5.199)],
)
def test_few_steps_require_more_standard_errors(
    steps: int, probability: float, quantile: float
) -> None:
    """Quantiles of Student's t (scipy.stats.t.isf)."""
    assert t_quantile(probability, steps) == pytest.approx(quantile, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_five_times_slower_is_reported_on_a_busy_machine(seed: int) -> None:
    """Steps vary by a factor of two, in rows, and one of twenty takes up to ten times as long; 60
    slow steps follow 100.
    """
    rng = np.random.default_rng(seed)
    noise = 0.5 * ar1(rng, steps=160, correlation=0.4) + np.where(
        rng.random(160) < 0.05, rng.exponential(1.0, 160), 0.0
    )
    times = 0.04 * np.exp(noise)
    changes = detector()
    assert changes.add(times[:100].tolist()) == []
    times[100:] *= 5.0
    (before,) = changes.add(times[100:].tolist())
    assert changes.current is not None and changes.kind == "shift"
    assert abs(changes.current.first - 100) <= 3
    assert changes.current.log_s - before.log_s == pytest.approx(math.log(5.0), abs=0.4)


def test_since_when_and_by_how_much() -> None:
    times = step_times(np.random.default_rng(3), steps=900)
    times[600:] *= 1.3
    changes = detector()
    (before,) = changes.add(times.tolist())
    now = changes.current
    assert now is not None
    assert abs(now.first - 600) <= 3
    assert 600 < now.alarm <= 620
    assert now.log_s - before.log_s == pytest.approx(math.log(1.3), abs=0.02)


def test_a_job_that_slows_bit_by_bit_is_told() -> None:
    times = step_times(np.random.default_rng(4), steps=6000) * np.exp(np.linspace(0.0, 0.15, 6000))
    assert len(detector().add(times.tolist())) >= 1


def test_going_on_from_the_stored_state_gives_the_same_alarms() -> None:
    times = step_times(np.random.default_rng(5), steps=1200)
    times[700:] *= 1.12
    whole, alarms = detector(), []
    parts, restarted = detector(), []
    for number, each in enumerate(times):
        alarms += [number] * len(whole.add([each]))
        restarted += [number] * len(parts.add([each]))
        if number % 37 == 0:
            parts = Changes.of(json.loads(json.dumps(parts.state())))
    assert alarms == restarted != []
    assert whole.state() == parts.state()


def test_memory_does_not_grow_with_the_steps() -> None:
    rng, changes = np.random.default_rng(6), detector()
    changes.add(step_times(rng, steps=5000).tolist())
    size = len(json.dumps(changes.state()))
    changes.add(step_times(rng, steps=30_000).tolist())
    assert len(json.dumps(changes.state())) < 1.1 * size < 40_000


def test_the_first_regime_starts_after_the_warm_up() -> None:
    warmup = assumed().watch.warmup_steps
    changes = detector()
    changes.add([9.0] * warmup + [1.0] * 50)  # compilation is no part of what is usual
    assert changes.first == warmup
    assert changes.baseline.reference == 0.0
