"""Properties that any calibration must have, whatever its parameters are called."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_tool.domain.units import GIB
from hp_tool.loop.calibration import Evidence, fit_calibration, prior_for
from hp_tool.loop.learning.make import predicted_unseen

PARTS = ("compute", "recompute", "tensor_parallel", "data_parallel", "pipeline_bubble", "optimizer")
CAPACITY = 80.0 * GIB


def make_parts(rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    scale = {
        "compute": 5.0,
        "recompute": 1.0,
        "tensor_parallel": 1.5,
        "data_parallel": 0.5,
        "pipeline_bubble": 0.6,
        "optimizer": 0.2,
    }
    return {name: scale[name] * rng.uniform(0.2, 2.0, rows) for name in PARTS}


def make_evidence(
    parts: dict[str, np.ndarray],
    measured: np.ndarray,
    *,
    memory: np.ndarray | None = None,
    measured_memory: np.ndarray | None = None,
    oom: np.ndarray | None = None,
) -> Evidence:
    rows = measured.size
    return Evidence(
        measurement_ids=tuple(f"m{i}" for i in range(rows)),
        parts_s=parts,
        layer_passes=np.full(rows, 100.0),
        memory_bytes=np.full(rows, 40.0 * GIB) if memory is None else memory,
        capacity_bytes=np.full(rows, CAPACITY),
        measured_step_s=measured,
        measured_memory_bytes=np.full(rows, np.nan) if measured_memory is None else measured_memory,
        out_of_memory=np.zeros(rows, dtype=bool) if oom is None else oom,
    )


def total(parts: dict[str, np.ndarray]) -> np.ndarray:
    return np.sum(list(parts.values()), axis=0)


@pytest.mark.parametrize("prior", [prior_for(kind="gpu"), prior_for(kind="cpu")])
def test_no_evidence_is_the_identity(prior):
    parts = make_parts(20, 0)
    calibration = fit_calibration(prior=prior)
    step = calibration.step_time.predict(parts_s=parts, layer_passes=np.full(20, 7.0))
    np.testing.assert_allclose(step.median_s, total(parts), rtol=1e-15)
    memory = np.linspace(1.0, 100.0, 20) * GIB
    np.testing.assert_array_equal(
        calibration.memory.predict(memory_bytes=memory).median_bytes, memory
    )
    assert calibration.measurement_ids == ()


@given(factor=st.floats(0.4, 2.5), seed=st.integers(0, 50))
def test_one_consistent_factor_is_recovered(factor, seed):
    parts, unseen = make_parts(12, seed), make_parts(8, seed + 1000)
    calibration = fit_calibration(
        evidence=make_evidence(parts, factor * total(parts)), prior=prior_for(kind="cpu")
    )
    step = calibration.step_time.predict(parts_s=unseen, layer_passes=np.full(8, 100.0))
    np.testing.assert_allclose(step.median_s, factor * total(unseen), rtol=0.05)


def test_factors_of_groups_and_overhead_are_told_apart():
    parts = make_parts(60, 3)
    truth = 0.8 * (parts["compute"] + parts["recompute"] + parts["pipeline_bubble"])
    truth += 2.0 * (parts["tensor_parallel"] + parts["data_parallel"]) + parts["optimizer"]
    calibration = fit_calibration(evidence=make_evidence(parts, truth), prior=prior_for(kind="cpu"))
    assert calibration.step_time.factors["compute"] == pytest.approx(0.8, rel=0.05)
    assert calibration.step_time.factors["communication"] == pytest.approx(2.0, rel=0.05)


def test_optimizer_and_offload_have_a_factor_of_their_own():
    """Memory three times as slow as predicted, matmuls and links as fast as predicted; each part
    rules some of the steps.
    """
    rng = np.random.default_rng(4)
    parts = {
        name: 10.0 ** rng.uniform(-1.0, 2.0, 60)
        for name in ("compute", "attention", "data_parallel", "optimizer", "offload")
    }
    truth = total(parts) + 2.0 * (parts["optimizer"] + parts["offload"])
    factors = fit_calibration(
        evidence=make_evidence(parts, truth), prior=prior_for(kind="cpu")
    ).step_time.factors
    assert factors == pytest.approx(
        {"compute": 1.0, "attention": 1.0, "communication": 1.0, "memory_bound": 3.0}, rel=0.04
    )


@pytest.mark.parametrize("factor", [np.exp(3.0), np.exp(-3.0)])
def test_a_slip_teaches_nothing_whichever_way_it_goes(factor):
    """One step time 20 standard deviations too slow or too fast leaves what the others say where it
    was.
    """
    parts = make_parts(9, 4)
    measured = 1.1 * total(parts)
    alone = fit_calibration(
        evidence=make_evidence({k: v[1:] for k, v in parts.items()}, measured[1:]),
        prior=prior_for(kind="cpu"),
    )
    disturbed = fit_calibration(
        evidence=make_evidence(parts, np.r_[factor * measured[0], measured[1:]]),
        prior=prior_for(kind="cpu"),
    )
    np.testing.assert_allclose(
        list(disturbed.step_time.factors.values()),
        list(alone.step_time.factors.values()),
        rtol=0.01,
    )


def test_runs_faster_than_predicted_do_not_make_overheads_negative():
    """Each 50 ms faster than its compute: only a negative overhead would fit them all, and make
    short steps end before they begin.
    """
    parts = {"compute": np.linspace(0.1, 1.0, 20)}
    fit = fit_calibration(
        evidence=make_evidence(parts, parts["compute"] - 0.05), prior=prior_for(kind="cpu")
    ).step_time
    assert fit.step_overhead_s >= 0.0 and fit.layer_overhead_s >= 0.0
    short = fit.predict(parts_s={"compute": np.array([0.01])}, layer_passes=np.array([100.0]))
    assert 0.005 < short.median_s[0] < 0.01


def test_layer_overhead_is_found_where_passes_vary():
    rng = np.random.default_rng(0)
    parts = {"compute": rng.uniform(0.05, 0.5, 30)}
    passes = rng.integers(8, 256, 30).astype(float)
    evidence = Evidence(
        measurement_ids=tuple(map(str, range(30))),
        parts_s=parts,
        layer_passes=passes,
        memory_bytes=np.full(30, GIB),
        capacity_bytes=np.full(30, CAPACITY),
        measured_step_s=parts["compute"] + 2e-3 * passes,
        measured_memory_bytes=np.full(30, np.nan),
        out_of_memory=np.zeros(30, dtype=bool),
    )
    fit = fit_calibration(evidence=evidence, prior=prior_for(kind="cpu")).step_time
    assert fit.layer_overhead_s == pytest.approx(2e-3, rel=0.1)
    calibrated = fit.calibrated_parts(parts_s=parts, layer_passes=passes)
    np.testing.assert_allclose(
        total(calibrated), fit.predict(parts_s=parts, layer_passes=passes).median_s, rtol=1e-4
    )


@given(order=st.permutations(range(10)))
@settings(max_examples=15)
def test_the_order_of_rows_does_not_matter(order):
    parts = make_parts(10, 5)
    measured = total(parts) * np.random.default_rng(1).lognormal(0.2, 0.05, 10)
    first = fit_calibration(evidence=make_evidence(parts, measured), prior=prior_for(kind="gpu"))
    index = np.array(order)
    shuffled = make_evidence({k: v[index] for k, v in parts.items()}, measured[index])
    second = fit_calibration(evidence=shuffled, prior=prior_for(kind="gpu"))
    np.testing.assert_array_equal(first.step_time.x, second.step_time.x)
    assert first.step_time.residual_log_sd == second.step_time.residual_log_sd


@given(scale=st.floats(0.1, 10.0))
@settings(max_examples=15)
def test_parts_scale(scale):
    """Doubling every prediction and every measurement doubles new predictions: nothing but ratios
    is learnt (bar overheads).
    """
    prior = prior_for(kind="gpu")
    parts = make_parts(10, 6)
    measured = total(parts) * 0.8
    base = fit_calibration(evidence=make_evidence(parts, measured), prior=prior)
    scaled_parts = {k: scale * v for k, v in parts.items()}
    scaled = fit_calibration(evidence=make_evidence(scaled_parts, scale * measured), prior=prior)
    one = base.step_time.predict(parts_s=parts, layer_passes=np.full(10, 100.0)).median_s
    two = scaled.step_time.predict(parts_s=scaled_parts, layer_passes=np.full(10, 100.0)).median_s
    np.testing.assert_allclose(two, scale * one, rtol=0.01)


def test_one_disturbed_run_does_not_drag_the_rest():
    parts = make_parts(12, 7)
    measured = 1.3 * total(parts)
    measured[4] *= 8.0
    calibration = fit_calibration(
        evidence=make_evidence(parts, measured), prior=prior_for(kind="cpu")
    )
    unseen = make_parts(6, 8)
    step = calibration.step_time.predict(parts_s=unseen, layer_passes=np.full(6, 100.0))
    np.testing.assert_allclose(step.median_s, 1.3 * total(unseen), rtol=0.10)


def test_intervals_widen_with_less_evidence_and_cover_the_truth():
    rng = np.random.default_rng(9)
    unseen = make_parts(200, 10)
    truth = 1.4 * total(unseen) * rng.lognormal(0.0, 0.05, 200)
    widths, coverage = [], []
    for rows in (0, 2, 5, 40):
        parts = make_parts(rows, 11)
        measured = (
            1.4 * total(parts) * np.random.default_rng(12).lognormal(0.0, 0.05, rows)
            if rows
            else np.empty(0)
        )
        evidence = make_evidence(parts, measured) if rows else None
        step = fit_calibration(evidence=evidence, prior=prior_for(kind="cpu")).step_time.predict(
            parts_s=unseen, layer_passes=np.full(200, 100.0)
        )
        low, high = step.interval(confidence=0.9)
        widths.append(float(np.median(np.log(high / low))))
        coverage.append(float(np.mean((low <= truth) & (truth <= high))))
    assert widths == sorted(widths, reverse=True)
    assert min(coverage) >= 0.9
    narrow_low, narrow_high = step.interval(confidence=0.5)
    assert np.all(narrow_low > low) and np.all(narrow_high < high)


@given(
    fractions=st.lists(st.floats(0.3, 1.2), min_size=1, max_size=6),
    measured=st.lists(st.floats(0.1, 0.29), min_size=0, max_size=4),
)
def test_what_ran_out_of_memory_is_never_called_fitting(fractions, measured):
    predicted = CAPACITY * np.array([*fractions, *measured])
    oom = np.arange(predicted.size) < len(fractions)
    evidence = make_evidence(
        make_parts(predicted.size, 0),
        np.full(predicted.size, np.nan),
        memory=predicted,
        measured_memory=np.where(oom, np.nan, predicted),
        oom=oom,
    )
    prediction = fit_calibration(evidence=evidence, prior=prior_for(kind="gpu")).memory.predict(
        memory_bytes=predicted[oom]
    )
    assert np.all(prediction.median_bytes >= CAPACITY)
    assert np.all(prediction.fit_probability(CAPACITY) <= 0.5)


def test_memory_factor_and_overhead_are_learnt():
    predicted = np.linspace(10.0, 70.0, 20) * GIB
    evidence = make_evidence(
        make_parts(20, 1),
        np.full(20, np.nan),
        memory=predicted,
        measured_memory=1.06 * predicted + 0.7 * GIB,
    )
    memory = fit_calibration(evidence=evidence, prior=prior_for(kind="gpu")).memory.predict(
        memory_bytes=np.array([30.0 * GIB])
    )
    assert memory.median_bytes[0] == pytest.approx(1.06 * 30 * GIB + 0.7 * GIB, rel=0.01)


def test_payload_round_trip_and_version():
    parts = make_parts(5, 2)
    calibration = fit_calibration(
        evidence=make_evidence(parts, 1.2 * total(parts)), prior=prior_for(kind="cpu")
    )
    payload = json.loads(json.dumps(calibration.to_dict()))
    again = type(calibration).from_dict(payload)
    assert again.measurement_ids == ("m0", "m1", "m2", "m3", "m4")
    unseen = make_parts(4, 3)
    one = calibration.step_time.predict(parts_s=unseen, layer_passes=np.ones(4))
    two = again.step_time.predict(parts_s=unseen, layer_passes=np.ones(4))
    np.testing.assert_array_equal(one.median_s, two.median_s)
    np.testing.assert_array_equal(one.log_sd, two.log_sd)
    for version in (1, 3, 99):
        with pytest.raises(ValueError, match="version"):
            type(calibration).from_dict({**payload, "version": version})


def test_evidence_columns_must_agree_and_concatenate():
    a = make_evidence({"compute": np.ones(2)}, np.ones(2))
    b = make_evidence({"optimizer": np.ones(1)}, np.ones(1))
    both = Evidence.concatenate([a, b])
    assert len(both) == 3
    np.testing.assert_array_equal(both.parts_s["compute"], [1.0, 1.0, 0.0])
    assert len(Evidence.concatenate([])) == 0
    with pytest.raises(ValueError, match="one value per measurement"):
        make_evidence({"compute": np.ones(3)}, np.ones(2))


def test_what_a_fit_is_said_to_know_of_a_configuration_it_knows_not_from_its_repeats():
    parts = {
        "compute": np.repeat([0.5, 1.0, 2.0, 4.0], 3),
        "tensor_parallel": np.repeat([0.1, 0.4, 0.2, 0.3], 3),
    }
    measured = 1.5 * total(parts)
    odd = measured.copy()
    odd[3:6] *= 1.8
    before = predicted_unseen(make_evidence(parts, measured), prior=prior_for(kind="cpu"))
    after = predicted_unseen(make_evidence(parts, odd), prior=prior_for(kind="cpu"))
    np.testing.assert_allclose(after[3:6], before[3:6], rtol=1e-9)
    assert np.abs(after[3:6] / odd[3:6] - 1.0).min() > 0.3
    alone = {name: seconds[:3] for name, seconds in parts.items()}
    assert np.isnan(
        predicted_unseen(make_evidence(alone, measured[:3]), prior=prior_for(kind="cpu"))
    ).all()
