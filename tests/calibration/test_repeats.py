"""Repeats of one configuration: a fit stays small and says the same, in whatever order they
came.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hp_tool.loop.calibration import Evidence, fit_calibration
from hp_tool.loop.calibration.evidence import FloatArray

CONFIGURATIONS = 5


def repeated(times: int, *, stalled: float = 0.0) -> Evidence:
    """Runs of CONFIGURATIONS configurations, 1.3 times slower than predicted with 3% of noise; a
    share stalls.
    """
    rows = np.repeat(np.arange(CONFIGURATIONS), times)
    count, dice = len(rows), np.random.default_rng(0)
    predicted: FloatArray = 1.0 + rows.astype(np.float64)
    slow = np.where(dice.random(count) < stalled, 10.0, 1.0)
    return Evidence(
        measurement_ids=tuple(f"{row:016x}" for row in range(count)),
        parts_s={"compute": predicted},
        layer_passes=100.0 * predicted,
        memory_bytes=1e9 * predicted,
        capacity_bytes=np.full(count, 1e11),
        measured_step_s=1.3 * predicted * slow * np.exp(0.03 * dice.standard_normal(count)),
        measured_memory_bytes=1.05e9 * predicted,
        out_of_memory=np.zeros(count, dtype=np.bool_),
        features={"tensor_parallel": rows.astype(np.float64), "micro_batches": np.zeros(count)},
    )


def predicted_s(evidence: Evidence) -> FloatArray:
    asked = repeated(1)
    step = fit_calibration(evidence=evidence).step_time
    return step.predict(
        parts_s=asked.parts_s, layer_passes=asked.layer_passes, features=asked.features
    ).median_s


def test_a_stored_calibration_does_not_grow_with_repeats() -> None:
    sizes = {}
    for times in (10, 60):
        payload = fit_calibration(evidence=repeated(times)).to_dict()
        assert (
            len(payload.pop("measurement_ids")) == times * CONFIGURATIONS
        )  # all that it stands for
        sizes[times] = len(json.dumps(payload))
    assert sizes[60] < 1.1 * sizes[10]


@pytest.mark.parametrize("stalled", [0.0, 0.2])
def test_many_repeats_are_predicted_at_their_median(stalled: float) -> None:
    evidence = repeated(40, stalled=stalled)
    medians = [
        np.median(evidence.measured_step_s[evidence.parts_s["compute"] == 1.0 + row])
        for row in range(CONFIGURATIONS)
    ]
    assert predicted_s(evidence) == pytest.approx(medians, rel=0.04)


def test_the_order_of_repeats_does_not_matter() -> None:
    evidence = repeated(20)
    shuffled = evidence.take(np.random.default_rng(1).permutation(len(evidence)))
    assert predicted_s(shuffled).tolist() == predicted_s(evidence).tolist()


def test_one_that_ran_out_of_memory_is_not_lost_among_many_that_fitted() -> None:
    evidence = repeated(40)
    out = np.arange(len(evidence)) == 7
    nothing = (
        np.where(out, np.nan, evidence.measured_step_s),
        np.where(out, np.nan, evidence.measured_memory_bytes),
    )
    evidence = replace(
        evidence, out_of_memory=out, measured_step_s=nothing[0], measured_memory_bytes=nothing[1]
    )
    alone = replace(evidence.take(np.flatnonzero(~out)))
    asked = repeated(1)
    needs = [
        fit_calibration(evidence=each)
        .memory.predict(memory_bytes=asked.memory_bytes, features=asked.features)
        .median_bytes[0]
        for each in (evidence, alone)
    ]
    assert needs[0] != needs[1]
