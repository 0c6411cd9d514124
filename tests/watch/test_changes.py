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
from hp_tool.watch.slowdowns.baseline import Baseline, upper_bound
from hp_tool.watch.slowdowns.changes import Changes
from hp_tool.watch.slowdowns.levels import Level, drift_sd


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
    """A CPU that others use: half of the time every step takes 8 % longer, for five steps on
    average.
    """
    rng = np.random.default_rng(0)
    slow, times = False, []
    for noise in rng.normal(0.0, 0.01, 5000):
        slow = slow if rng.random() < 0.8 else not slow
        times.append(math.exp(noise) * (1.08 if slow else 1.0))
    assert detector().add(times) == []


def test_weights_are_those_of_the_definition() -> None:
    """A hundred steps of which four lie beyond half a shift, none behind another."""
    baseline = Baseline()
    for number in range(100):
        baseline.add(0.5 if number % 25 == 10 else 0.001 * (number % 7 - 3))
    level = Level(log_shift=math.log(1.1))
    level.learn(baseline, ordered=sorted(baseline.residuals))
    z, n, share = 2.33, 100, 0.04
    bound = (
        share + z * z / (2 * n) + z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    ) / (1 + z * z / n)
    assert level.gain == pytest.approx(math.log((101 / 102) / bound))
    assert level.loss == pytest.approx(math.log((1 / 102) / (1 - bound)))
    assert level.limit == pytest.approx(math.log(1.1) / 2)


def test_slow_steps_in_rows_tell_less() -> None:
    """Ten of a hundred steps are slow, in a row: the correlation of consecutive bits is (9 / 99 -
    0.01) / 0.09.
    """
    baseline = Baseline()
    for number in range(100):
        baseline.add(0.5 if 50 <= number < 60 else 0.001 * (number % 7 - 3))
    level = Level(log_shift=math.log(1.1))
    level.learn(baseline, ordered=sorted(baseline.residuals))
    r = (9 / 99 - 0.01) / 0.09 - 1 / math.sqrt(100)
    p0 = upper_bound(0.1, 100)
    assert level.gain == pytest.approx(math.log((101 / 102) / p0) * (1 - r) / (1 + r))


def test_the_median_of_independent_steps_has_its_known_deviation() -> None:
    independent = drift_sd(100, sd=0.03, correlation=0.0, reference_steps=100)
    assert independent == pytest.approx(0.03 * math.sqrt(2 * math.pi / 2 / 100))
    rng = np.random.default_rng(0)
    shocks, logs = rng.normal(0.0, math.sqrt(1 - 0.9**2), (4000, 160)), np.zeros((4000, 160))
    for step in range(1, 160):
        logs[:, step] = 0.9 * logs[:, step - 1] + shocks[:, step]
    simulated = np.median(logs[:, 60:], axis=1).std()
    assert drift_sd(100, sd=1.0, correlation=0.9, reference_steps=10**9) == pytest.approx(
        simulated, rel=0.05
    )


def test_the_threshold_is_the_run_length_of_all_tests_together() -> None:
    tests = 2 * len(assumed().watch.slowdowns)
    assert detector().threshold == pytest.approx(
        math.log(assumed().watch.false_alarm_steps * tests)
    )


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
