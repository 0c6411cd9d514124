"""The model of failures against its closed forms, the paper it comes from, a simulation, and a published training."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.domain.sizing import ReliabilityQuery
from hp_tool.sizing import goodput
from hp_tool.sizing.goodput import MTBF_PER_GPU_S, best_interval_s, time_stretch, young_interval_s

CHECKPOINTS, MTBFS, RESTARTS = st.floats(0.1, 3_600.0), st.floats(600.0, 1e7), st.floats(0.0, 7_200.0)


@pytest.mark.parametrize(("mtbf_s", "interval_minutes"), [(86_400.0, 117.0), (21_600.0, 57.0), (900.0, 9.1)])
def test_optima_of_dalys_figures(mtbf_s: float, interval_minutes: float) -> None:
    # Figures 3 to 5 of the paper: checkpoints of five minutes.
    assert best_interval_s(checkpoint_s=300.0, mtbf_s=mtbf_s) / 60.0 == pytest.approx(interval_minutes, rel=0.01)


@given(checkpoint_s=CHECKPOINTS, mtbf_s=MTBFS, restart_s=RESTARTS, factor=st.floats(0.2, 5.0))
def test_no_other_interval_is_better(checkpoint_s: float, mtbf_s: float, restart_s: float, factor: float) -> None:
    costs = {"checkpoint_s": checkpoint_s, "mtbf_s": mtbf_s}
    best = best_interval_s(**costs)
    least = time_stretch(interval_s=best, restart_s=restart_s, **costs)
    assert time_stretch(interval_s=factor * best, restart_s=restart_s, **costs) >= least * (1.0 - 1e-6)


@given(checkpoint_s=CHECKPOINTS, ratio=st.floats(1e4, 1e8))
def test_youngs_optimum_where_checkpoints_are_short(checkpoint_s: float, ratio: float) -> None:
    costs = {"checkpoint_s": checkpoint_s, "mtbf_s": ratio * checkpoint_s}
    assert best_interval_s(**costs) == pytest.approx(young_interval_s(**costs), rel=0.01)


@given(interval_s=st.floats(60.0, 1e5), checkpoint_s=CHECKPOINTS, restart_s=RESTARTS)
def test_without_failures_checkpoints_alone_cost(interval_s: float, checkpoint_s: float, restart_s: float) -> None:
    stretch = time_stretch(interval_s=interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=1e13)
    assert stretch == pytest.approx((interval_s + checkpoint_s) / interval_s, rel=1e-6)


@pytest.mark.parametrize("mtbf_s", [3_600.0, 14_400.0, 86_400.0])
def test_simulated_failures(mtbf_s: float) -> None:
    interval_s, checkpoint_s, restart_s, segments = 1_800.0, 60.0, 600.0, 20_000
    draw = random.Random(7)

    def survives(span_s: float) -> tuple[bool, float]:
        failure_s = draw.expovariate(1.0 / mtbf_s)
        return failure_s >= span_s, min(failure_s, span_s)

    elapsed = 0.0
    for _ in range(segments):
        done = False
        while not done:
            done, spent = survives(interval_s + checkpoint_s)
            elapsed += spent
            restarted = done
            while not restarted:
                restarted, spent = survives(restart_s)
                elapsed += spent
    expected = time_stretch(interval_s=interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=mtbf_s)
    assert elapsed / (segments * interval_s) == pytest.approx(expected, rel=0.02)


def test_llama_3_kept_more_than_nine_tenths() -> None:
    # arXiv 2407.21783, section 3.3.4: effective training time above 90 % on 16,384 H100.
    found = goodput(num_gpus=16_384, num_nodes=2_048, parameters=405e9, reliability=ReliabilityQuery())
    assert 0.90 < found.fraction < 0.97
    assert found.mtbf_s == pytest.approx(54 * 86_400 / 419) == MTBF_PER_GPU_S / 16_384
    assert "2407.21783" in found.source


def test_what_is_given_is_used_and_no_source_is_claimed_for_it() -> None:
    given = ReliabilityQuery(mtbf_per_gpu_hours=1_000.0, checkpoint_s=30.0, checkpoint_interval_s=900.0, restart_s=120.0)
    found = goodput(num_gpus=100, num_nodes=13, parameters=1e9, reliability=given)
    assert (found.mtbf_s, found.checkpoint_s, found.checkpoint_interval_s, found.restart_s) == (36_000.0, 30.0, 900.0, 120.0)
    assert found.source == "as given"


def test_a_job_that_never_gets_through_a_checkpoint_has_no_goodput() -> None:
    hopeless = ReliabilityQuery(mtbf_per_gpu_hours=1.0, checkpoint_s=3_600.0, restart_s=7_200.0)
    assert goodput(num_gpus=10_000, num_nodes=1_250, parameters=1e12, reliability=hopeless).fraction < 1e-100
