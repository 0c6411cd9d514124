"""What any calibration of step times must keep to, beside the interval that the cost model
states.
"""

from __future__ import annotations

import numpy as np
import pytest

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.units import GIB
from hp_tool.loop.calibration import Evidence, fit_calibration, prior_for
from hp_tool.loop.calibration.evidence import DEVICE_LOG_SD, PAIR_LOG_SD, STEP_LOG_SD

STATED = 0.08


def runs(count, *, hidden=12.0, seed=0, **given):
    """Features of `count` layouts of one model, and their parts."""
    rng = np.random.default_rng(seed)
    found = {
        "hidden_size": np.full(count, hidden),
        "tensor_parallel": rng.integers(0, 4, count).astype(float),
        "pipeline_parallel": rng.integers(0, 3, count).astype(float),
        "micro_batch": rng.integers(0, 3, count).astype(float),
        "micro_batches": rng.integers(3, 6, count).astype(float),
        STEP_LOG_SD: np.full(count, STATED),
        PAIR_LOG_SD: np.full(count, 0.06),
        DEVICE_LOG_SD: np.zeros(count),
    } | {name: np.full(count, value) for name, value in given.items()}
    return found, {
        "compute": rng.uniform(1.0, 3.0, count),
        "data_parallel": rng.uniform(0.1, 0.5, count),
    }


def evidence(found, parts, ratio):
    count = len(parts["compute"])
    return Evidence(
        measurement_ids=tuple(f"m{row}" for row in range(count)),
        parts_s=parts,
        layer_passes=np.full(count, 10.0),
        memory_bytes=np.full(count, 20.0 * GIB),
        capacity_bytes=np.full(count, 80.0 * GIB),
        measured_step_s=sum(parts.values()) * ratio,
        measured_memory_bytes=np.full(count, np.nan),
        out_of_memory=np.zeros(count, dtype=bool),
        features=found,
    )


def predicted(taught, found, parts):
    """(median over uncalibrated, ln(high / low)) after learning from `taught`; None: nothing."""
    fit = fit_calibration(evidence=taught, prior=prior_for(kind="gpu")).step_time
    step = fit.predict(
        parts_s=parts, layer_passes=np.full(len(parts["compute"]), 10.0), features=found
    )
    low, high = step.interval()
    return step.median_s / sum(parts.values()), np.log(high / low)


def noise(count, *, sd=0.02, seed=3):
    return np.random.default_rng(seed).lognormal(0.0, sd, count)


def test_without_runs_the_interval_is_the_one_that_the_cost_model_states():
    ratio, width = predicted(None, *runs(10))
    np.testing.assert_allclose(ratio, 1.0)
    np.testing.assert_allclose(width, 2 * NORMAL_QUANTILE * STATED, rtol=1e-4)


@pytest.mark.parametrize("excess", [-0.1, 0.0, 0.1])
def test_a_first_run_inside_its_interval_widens_none(excess):
    _, width = predicted(evidence(*runs(1), np.exp(excess)), *runs(10, seed=1))
    assert np.all(width <= 2 * NORMAL_QUANTILE * STATED * 1.001)


@pytest.mark.parametrize("factor", [0.85, 1.2])
def test_a_factor_that_all_runs_share_is_learnt(factor):
    ratio, width = predicted(evidence(*runs(40), factor * noise(40)), *runs(20, seed=1))
    np.testing.assert_allclose(ratio, factor, rtol=0.04)
    assert width.max() < 2 * NORMAL_QUANTILE * STATED


def test_a_model_that_did_not_run_has_no_narrower_interval():
    taught = evidence(*runs(40), 1.1 * noise(40))
    _, same = predicted(taught, *runs(10, seed=1))
    _, other = predicted(taught, *runs(10, seed=1, hidden=13.0))
    assert same.max() < 2 * NORMAL_QUANTILE * STATED * 0.999 < other.min()


def test_intervals_widen_with_distance():
    found, parts = runs(12, micro_batch=1.0)
    steps = [0.0, 2.0, 4.0, 8.0, 16.0]
    asked = {name: np.full(len(steps), values[0]) for name, values in found.items()} | {
        "micro_batch": 1.0 + np.array(steps)
    }
    _, width = predicted(
        evidence(found, parts, noise(12)),
        asked,
        {name: np.full(5, one[0]) for name, one in parts.items()},
    )
    assert np.all(np.diff(width) > 0)


def test_models_that_disagree_teach_others_nothing():
    """Four models off by 15% in turn: the next one is left where the cost model has it, those that
    ran are corrected.
    """
    pieces = [
        evidence(*runs(6, hidden=8.0 + 2 * n, seed=n), np.exp(0.15 * (-1) ** n) * noise(6, seed=n))
        for n in range(4)
    ]
    taught = Evidence.concatenate(pieces)
    unseen, _ = predicted(taught, *runs(10, hidden=17.0, seed=9))
    np.testing.assert_allclose(unseen, 1.0, atol=0.03)
    seen, _ = predicted(taught, *runs(10, hidden=10.0, seed=9))
    np.testing.assert_allclose(seen, np.exp(-0.15), rtol=0.05)


@pytest.mark.parametrize("slip", [5.0, 0.2, 1.5])
def test_one_bad_run_of_five_costs_little(slip):
    found, parts = runs(5)
    clean = noise(5)
    asked = runs(20, seed=1)
    before, _ = predicted(evidence(found, parts, clean), *asked)
    after, _ = predicted(evidence(found, parts, clean * np.r_[slip, np.ones(4)]), *asked)
    assert np.mean(np.abs(after / before - 1.0)) < 0.03


def test_the_order_of_runs_does_not_matter():
    found, parts = runs(12)
    first, order = (
        evidence(found, parts, noise(12, sd=0.1)),
        np.random.default_rng(0).permutation(12),
    )
    for one, other in zip(
        predicted(first, *runs(5, seed=1)),
        predicted(first.take(order), *runs(5, seed=1)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-9)
