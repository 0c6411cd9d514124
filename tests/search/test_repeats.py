"""Repeats where they decide."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import RunRecord
from hp_tool.domain.states import RunState
from hp_tool.loop.search.noise import measured_steps, standard_error_s
from hp_tool.loop.search.planner import needs_repeat


def run(b, times, *, fidelity=None):
    fidelity = fidelity or Fidelity()
    measurement = Measurement(
        status="ok", step_s=float(np.median(times)), step_times_s=tuple(times), fidelity=fidelity
    )
    return RunRecord(
        id=f"r{b}",
        search_id="s",
        number=b,
        digest=f"{b}",
        attempt=0,
        state=RunState.FINISHED,
        parallel=ParallelConfig(micro_batch_size=b),
        fidelity=fidelity,
        predicted={},
        job_name=f"j{b}",
        token=1,
        measurement=measurement,
        created_at=datetime.now(UTC),
    )


NOISY = (0.8, 0.9, 1.0, 1.1, 1.2)
STEADY = (0.999, 1.0, 1.001)


def scaled(factor, times=STEADY):
    return tuple(factor * time for time in times)


@pytest.mark.parametrize(
    "runner_up,is_unsure",
    [
        (scaled(1.02, NOISY), True),
        (scaled(1.5, NOISY), False),
        (scaled(1.02), True),  # steady steps say nothing of another run
        (scaled(1.06), True),  # 1.645 x sqrt(2) x 0.03 is 7%
        (scaled(1.08), False),
    ],
)
def test_a_leader_within_the_noise_of_a_run_is_unsure(runner_up, is_unsure):
    assert needs_repeat([run(1, STEADY), run(2, runner_up)], kind="gpu") is is_unsure


def test_repeats_that_agree_settle_a_closer_race():
    race = [run(1, STEADY), run(2, scaled(1.06))]
    agreeing = [each for b in range(3, 13) for each in (run(b, scaled(2.0)), run(b, scaled(2.0)))]
    assert needs_repeat(race, kind="gpu") and not needs_repeat([*race, *agreeing], kind="gpu")


def test_nobody_runs_three_times_and_one_alone_has_no_rival():
    twice = [run(1, NOISY), run(2, scaled(1.02)), run(1, NOISY, fidelity=Fidelity(steps=10))]
    assert not needs_repeat(twice, kind="cpu")
    assert not needs_repeat([run(1, NOISY)], kind="cpu")
    reduced = run(2, scaled(1.02), fidelity=Fidelity(num_micro_batches=2))
    assert not needs_repeat([run(1, NOISY), reduced], kind="cpu")


def test_a_ratio_is_of_the_means_of_runs_and_as_wide_as_their_noise():
    steps = measured_steps([run(1, STEADY), run(1, scaled(1.1)), run(2, scaled(2.2))], kind="gpu")
    assert steps.num_repeats == 1
    # s^2 = (4 x 0.03^2 + 2 (ln 1.1 / 2)^2) / 5
    assert steps.repeat_log_sd == pytest.approx(
        np.sqrt((4 * 0.03**2 + 2 * (np.log(1.1) / 2) ** 2) / 5)
    )
    factor, low, high = steps.ratio(
        ParallelConfig(micro_batch_size=2), ParallelConfig(micro_batch_size=1)
    )
    width = np.exp(1.6449 * np.sqrt(1.5) * steps.repeat_log_sd)  # one ran twice
    middle = 2.2 / np.sqrt(1.1)
    assert (factor, low, high) == pytest.approx((middle, middle / width, middle * width), rel=1e-4)


def test_the_standard_error_of_a_median_is_that_of_a_mean_by_the_root_of_half_pi():
    assert standard_error_s(run(1, NOISY).measurement) == pytest.approx(
        np.sqrt(np.pi / 2) * np.std(NOISY, ddof=1) / np.sqrt(5)
    )
