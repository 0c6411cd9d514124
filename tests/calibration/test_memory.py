"""What configurations alike needed in memory."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from hp_tool.domain.units import GIB
from hp_tool.loop.calibration import Calibration, fit_calibration, prior_for
from tests.calibration.test_regimes import evidence, features

PREDICTED = 20.0 * GIB
CAPACITY = 80.0 * GIB


def needs(found):
    """An allocator that keeps more the more tensor ranks there are, and much more on long
    pipelines.
    """
    return PREDICTED * (
        1.0 + 0.05 * found["tensor_parallel"] + 0.15 * (found["pipeline_parallel"] > 1.0)
    )


def learnt(rows, *, seed=0, measured=None, out_of_memory=None):
    found = features(rows, seed=seed)
    truth = (
        needs(found) * np.random.default_rng(7).lognormal(0.0, 0.01, rows)
        if measured is None
        else measured
    )
    pairs = evidence(found, np.full(rows, np.nan), out_of_memory=out_of_memory)
    return fit_calibration(
        evidence=replace(pairs, measured_memory_bytes=truth), prior=prior_for(kind="gpu")
    )


def predict(calibration, found, *, alike=True):
    memory = np.full(len(found["tensor_parallel"]), PREDICTED)
    return calibration.memory.predict(memory_bytes=memory, features=found if alike else None)


def test_kinds_of_configurations_that_need_more_are_learnt():
    unseen = features(60, seed=5)
    calibration = learnt(25)
    errors = [
        np.median(
            np.abs(predict(calibration, unseen, alike=alike).median_bytes / needs(unseen) - 1)
        )
        for alike in (1, 0)
    ]
    assert errors[0] < 0.02 < 0.04 < errors[1]
    low, high = predict(calibration, unseen).interval(confidence=0.9)
    assert np.mean((low <= needs(unseen)) & (needs(unseen) <= high)) >= 0.85


def test_one_odd_run_does_not_spoil_its_neighbours():
    found = features(25)
    odd = needs(found)
    odd[0] *= 3.0
    error = predict(learnt(25, measured=odd), found).median_bytes[1:] / needs(found)[1:] - 1
    assert np.median(np.abs(error)) < 0.02


def test_what_ran_out_is_not_called_fitting_others_are():
    found = features(20)
    found["tensor_parallel"][3] = 5.0
    ran_out = np.arange(20) == 3
    # Predicted to need far less than what fitted elsewhere: no factor on all of them can be the
    # reason.
    pairs = replace(
        evidence(found, np.full(20, np.nan), out_of_memory=ran_out),
        memory_bytes=np.where(ran_out, 0.8 * CAPACITY, 0.9 * CAPACITY),
        measured_memory_bytes=np.where(ran_out, np.nan, 0.9 * CAPACITY),
    )
    memory = np.full(20, 0.8 * CAPACITY)
    chance = (
        fit_calibration(evidence=pairs, prior=prior_for(kind="gpu"))
        .memory.predict(memory_bytes=memory, features=found)
        .fit_probability(CAPACITY)
    )
    assert chance[3] <= 0.5 < 0.9 < np.median(chance)


def test_a_stored_payload_predicts_the_same():
    calibration, unseen = learnt(10), features(8, seed=2)
    payload = json.loads(json.dumps(calibration.to_dict()))
    again = predict(Calibration.from_dict(payload), unseen)
    np.testing.assert_allclose(
        again.median_bytes, predict(calibration, unseen).median_bytes, rtol=1e-12
    )
    np.testing.assert_allclose(again.log_sd, predict(calibration, unseen).log_sd, rtol=1e-9)
