"""Repeats where they decide."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import RunRecord, RunState
from hp_tool.search.planner import repeat_gain, standard_error_s


def run(b, times, *, fidelity=None):
    fidelity = fidelity or Fidelity()
    measurement = Measurement(status="ok", step_s=float(np.median(times)), step_times_s=tuple(times), fidelity=fidelity)
    return RunRecord(
        id=f"r{b}", search_id="s", number=b, digest=f"{b}", attempt=0, state=RunState.FINISHED,
        parallel=ParallelConfig(micro_batch_size=b), fidelity=fidelity, predicted={}, job_name=f"j{b}", token=1,
        measurement=measurement, created_at=datetime.now(UTC),
    )  # fmt: skip


NOISY = (0.8, 0.9, 1.0, 1.1, 1.2)


def scaled(factor):
    return tuple(factor * time for time in NOISY)


def test_a_close_noisy_race_is_worth_a_repeat_and_a_clear_one_is_not():
    leader, close = repeat_gain([run(1, NOISY), run(2, scaled(1.02))])
    assert leader.parallel.micro_batch_size == 1
    assert close > 0.03
    assert repeat_gain([run(1, NOISY), run(2, scaled(1.5))])[1] < 0.002
    steady = [run(1, (1.0, 1.001, 0.999)), run(2, (1.02, 1.021, 1.019))]
    assert repeat_gain(steady)[1] < 1e-6


def test_the_gain_is_the_expected_shortfall_by_simulation():
    first, second = run(1, NOISY), run(2, scaled(1.05))
    sds = [standard_error_s(each.measurement) for each in (first, second)]
    rng = np.random.default_rng(0)
    drawn = rng.normal(1.0, sds[0], 400_000) - rng.normal(1.05, sds[1], 400_000)
    assert repeat_gain([first, second])[1] == pytest.approx(np.mean(np.maximum(drawn, 0.0)), rel=0.02)


def test_nobody_runs_three_times_and_one_alone_has_no_rival():
    twice = [run(1, NOISY), run(2, scaled(1.02)), run(1, NOISY, fidelity=Fidelity(steps=10))]
    assert repeat_gain(twice) is None
    assert repeat_gain([run(1, NOISY)]) is None
    reduced = run(2, scaled(1.02), fidelity=Fidelity(num_micro_batches=2))
    assert repeat_gain([run(1, NOISY), reduced]) is None
