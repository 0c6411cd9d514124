"""The answer of a search in figures and in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hp_tool.domain.answer import Answer, Baseline, Repeats
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.render.answer import headline, sentences, warning, why
from hp_tool.tuning.answer import alike, effect_of_axes

RUNS = Repeats(run_id="r", step_s=5.18, num_runs=2, low_s=4.18, high_s=5.18, reduced=False)
BASELINE = Baseline(
    parallel=ParallelConfig(tensor_parallel_size=4), source="search.baseline", step_s=4.85, speedup=1.31, saved_days=3.0,
    saved_cost=12_345.0, saved_parts_s={"tensor_parallel": 1.4, "pipeline_bubble": -0.25, "optimizer": 0.001},
)  # fmt: skip
ANSWER = Answer(
    parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2), step_s=3.7, step_s_interval=(3.6, 3.9),
    source="calibrated", known_from_runs=4, measured=RUNS, outside=True, as_good=5, free_memory_bytes=6 * 2**30,
    out_of_memory_probability=0.02, baseline=BASELINE,
)  # fmt: skip


def test_all_that_is_known_is_said_and_nothing_else():
    assert headline(ANSWER) == (
        "3.70 s per step (3.60 s to 3.90 s, calibrated by 4 runs), 1.31 times your baseline's speed, saves $12,345 over the "
        "training, 6.0 GiB of memory free, 2% chance of running out of memory"
    )
    assert why(ANSWER) == (
        "Against the baseline, TP 4 → 2, PP 1 → 2: 1.40 s less tensor parallel communication, 250.0 ms more pipeline bubble."
    )
    alone = replace(ANSWER, baseline=None, free_memory_bytes=-1.0, out_of_memory_probability=0.0, outside=False, as_good=0)
    assert sentences(alone) == [
        "3.70 s per step (3.60 s to 3.90 s, calibrated by 4 runs).",
        "Measured 5.18 s by the last of 2 runs, which took 4.18 s to 5.18 s.",
    ]
    days = replace(ANSWER, baseline=replace(BASELINE, saved_cost=None))
    assert "saves 3.0 days of training" in headline(days)


def test_a_measurement_outside_the_interval_warns():
    assert warning(ANSWER) is not None and "5.18 s lies outside 3.60 s to 3.90 s" in warning(ANSWER)
    assert warning(replace(ANSWER, outside=False)) is None


def test_rows_within_the_noise_are_as_good():
    known_s = np.array([1.0, 1.02, 1.3, 1.02, 0.99])
    log_sd = np.array([0.01, 0.01, 0.01, 0.0, 0.2])
    assert alike([0, 1, 2, 3, 4], known_s=known_s, log_sd=log_sd, noise={}) == 2
    assert alike([0, 1, 2, 3, 4], known_s=known_s, log_sd=log_sd, noise={0: 0.05}) == 3


def test_an_axis_costs_what_the_best_with_its_value_is_slower():
    axes = {"tensor_parallel_size": (1, 1, 2), "zero_stage": (1, 1, 1)}
    effects = effect_of_axes(axes, [0, 1, 2], np.array([3.0, 2.0, 4.0]))
    assert effects == {"tensor_parallel_size": {"1": 2.0, "2": pytest.approx(4.0)}}
