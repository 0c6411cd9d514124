"""What the multipliers leave over: biases of kinds of configurations, and runs that stall."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hp_tool.catalog import cluster, model
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import (
    Calibration,
    Evidence,
    fit_calibration,
    prior_for,
    residual_features,
)
from hp_tool.loop.calibration.evidence import STALL_RISK, STATED, STEP_LOG_SD, select_most_similar
from hp_tool.loop.calibration.prediction import SlowRegime, StepPrediction


def features(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "tensor_parallel": rng.integers(0, 4, rows).astype(float),
        "pipeline_parallel": rng.integers(0, 3, rows).astype(float),
        "micro_batches": rng.integers(3, 7, rows).astype(float),
    }


def evidence(found, measured, *, out_of_memory=None):
    rows = len(measured)
    return Evidence(
        measurement_ids=tuple(f"m{i}" for i in range(rows)),
        parts_s={"compute": np.ones(rows)},
        layer_passes=np.full(rows, 10.0),
        memory_bytes=np.full(rows, 20.0 * GIB),
        capacity_bytes=np.full(rows, 80.0 * GIB),
        measured_step_s=measured,
        measured_memory_bytes=np.full(rows, np.nan),
        out_of_memory=np.zeros(rows, dtype=bool) if out_of_memory is None else out_of_memory,
        features=found,
    )


def predict(calibration, found, *, with_features=True):
    rows = len(found["tensor_parallel"])
    return calibration.step_time.predict(
        parts_s={"compute": np.ones(rows)},
        layer_passes=np.full(rows, 10.0),
        features=found if with_features else None,
    )


def noise(rows, seed=1):
    return np.random.default_rng(seed).lognormal(0.0, 0.02, rows)


def test_a_kind_of_configuration_that_runs_slower_is_learnt():
    seen, unseen = features(25), features(60, seed=5)
    truth = {
        name: 1.0 + 0.1 * found["tensor_parallel"]
        for name, found in (("seen", seen), ("unseen", unseen))
    }
    calibration = fit_calibration(
        evidence=evidence(seen, truth["seen"] * noise(25)), prior=prior_for(kind="gpu")
    )
    error, plain = (
        np.median(
            np.abs(
                predict(calibration, unseen, with_features=known).median_s / truth["unseen"] - 1.0
            )
        )
        for known in (True, False)
    )
    assert error < 0.03 < 0.06 < plain


def test_stalled_runs_are_told_from_the_others_and_do_not_slow_them_down():
    seen, unseen = features(24), features(60, seed=5)
    stalls = {
        name: (found["pipeline_parallel"] == 2.0)
        for name, found in (("seen", seen), ("unseen", unseen))
    }
    measured = (1.0 + stalls["seen"] * 0.3 * np.exp2(seen["micro_batches"])) * noise(24)
    calibration = fit_calibration(evidence=evidence(seen, measured), prior=prior_for(kind="gpu"))
    step = predict(calibration, unseen)
    stalled = stalls["unseen"]
    assert (
        step.slow_probability[stalled].mean() > 0.35 > 0.2 > step.slow_probability[~stalled].mean()
    )
    np.testing.assert_allclose(
        step.regular_s, 1.0, rtol=0.05
    )  # of those that stall too, should they not
    truth = 1.0 + stalled * 0.3 * np.exp2(unseen["micro_batches"])
    assert step.slow is not None
    assert np.median(step.slow.step_s[stalled] / truth[stalled]) == pytest.approx(1.0, abs=0.1)
    low, high = step.interval(confidence=0.9)
    assert np.mean((low <= truth) & (truth <= high)) >= 0.9
    assert np.all(high[stalled] > 3.0)


def test_kinds_stall_as_often_as_is_stated_before_any_run_and_a_fit_presumes_none():
    """The first half of all runs is of a kind that stalls nine times as often as the other."""

    def known(rows, seed=0):
        risk = np.where(np.arange(rows) < rows // 2, np.log(3.0), -np.log(3.0))
        return features(rows, seed=seed) | {STEP_LOG_SD: np.full(rows, 0.8), STALL_RISK: risk}

    far = {name: values + 50.0 * (name not in STATED) for name, values in known(10, seed=5).items()}
    first = predict(fit_calibration(prior=prior_for(kind="gpu")), far).slow_probability
    assert first[0] == pytest.approx(9 * first[-1]) and first[0] > 0.5
    for stalled, low, high in ((0, 0.05, 0.25), (8, 0.25, 0.45)):
        measured = np.where(np.arange(24) < stalled, 8.0, 1.0) * noise(24)
        step = predict(
            fit_calibration(evidence=evidence(known(24), measured), prior=prior_for(kind="gpu")),
            far,
        )
        assert low < step.slow_probability[0] <= high
        assert step.slow_probability[0] == pytest.approx(step.slow_probability[-1], rel=1e-3)


@pytest.mark.parametrize(("stated", "stalls"), [(0.22, False), (0.4, True)])
def test_only_scatter_beyond_that_of_regular_runs_is_put_down_to_stalls(stated, stalls):
    known = features(24) | {STEP_LOG_SD: np.full(24, stated)}
    step = predict(
        fit_calibration(evidence=evidence(known, noise(24)), prior=prior_for(kind="gpu")), known
    )
    assert (step.slow is not None) == stalls


def test_pipelines_risk_most_until_their_prediction_has_the_stalls():
    candidates = Candidates.from_configs(
        ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=p, data_parallel_size=4 // p)
        for p in (1, 4)
    )

    def risks(nodes, held_up_beyond):
        machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8 * nodes))
        profile = efficiency_profile(gpu=machine.gpu, framework="nanotron")
        framework = replace(profile.framework, message_stall_nodes=held_up_beyond)
        case = TrainingCase(
            model=model("llama-3-8b"),
            cluster=machine,
            workload=TrainingWorkload(
                sequence_length=4096, global_batch_size=64, framework="nanotron"
            ),
            profile=replace(profile, framework=framework),
        )
        return residual_features(case=case, candidates=candidates)[STALL_RISK]

    alone, few, many, held_up = risks(1, 32), risks(4, 32), risks(16, 32), risks(16, 8)
    assert alone[0] == alone[1] < few[0] < few[1] < many[1]
    risk = assumed().features
    assert many[0] == pytest.approx(
        risk.one_node_stall_log_risk + 4.0 * risk.node_doubling_stall_log_risk
    )
    assert many[1] == pytest.approx(many[0] + risk.pipeline_stall_log_risk)
    assert held_up[0] == pytest.approx(many[0] + risk.held_up_stall_log_risk)
    assert np.exp(held_up[1]) == pytest.approx(assumed().stalls.unseen_share)


def test_releases_lie_apart_by_the_years_between_them():
    machine, alone = (
        cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=1)),
        Candidates.from_configs([ParallelConfig()]),
    )

    def year(release):
        workload = TrainingWorkload(
            sequence_length=4096, global_batch_size=64, framework_version=release
        )
        profile = efficiency_profile(gpu=machine.gpu, framework="megatron-core")
        case = TrainingCase(
            model=model("llama-3-8b"), cluster=machine, workload=workload, profile=profile
        )
        return float(residual_features(case=case, candidates=alone)["release"][0])

    assert year("25.01") - year("24.07") == pytest.approx(0.5)
    assert year("25.01") - year("24.12") == pytest.approx(1 / 12)


def test_a_machine_that_is_slower_throughout_does_not_stall():
    seen = features(12)
    calibration = fit_calibration(
        evidence=evidence(seen, 1.7 * noise(12)), prior=prior_for(kind="gpu")
    )
    step = predict(calibration, features(30, seed=3))
    assert step.slow_probability.max() < 0.2
    np.testing.assert_allclose(step.median_s, 1.7, rtol=0.05)


def test_one_stalled_run_leaves_the_prediction_of_the_others_alone():
    seen = features(1)
    calibration = fit_calibration(
        evidence=evidence(seen, np.array([20.0])), prior=prior_for(kind="gpu")
    )
    far = {name: values + 50.0 for name, values in features(5, seed=3).items()}
    np.testing.assert_allclose(predict(calibration, far).regular_s, 1.0, rtol=0.1)


def test_parts_sum_to_the_median_and_a_payload_says_the_same_again():
    seen, unseen = features(15), features(20, seed=7)
    measured = (1.0 + (seen["pipeline_parallel"] == 2.0) * 5.0) * noise(15)
    calibration = fit_calibration(evidence=evidence(seen, measured), prior=prior_for(kind="gpu"))
    step = predict(calibration, unseen)
    parts = calibration.step_time.calibrated_parts(
        parts_s={"compute": np.ones(20)}, layer_passes=np.full(20, 10.0), step=step
    )
    np.testing.assert_allclose(sum(parts.values()), step.median_s)
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    np.testing.assert_allclose(predict(again, unseen).median_s, step.median_s, rtol=1e-9)
    np.testing.assert_allclose(
        predict(again, unseen).slow_probability, step.slow_probability, rtol=1e-9
    )


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.9])
def test_quantiles_rise_and_enclose_both_regimes(probability):
    step = StepPrediction(
        regular_s=np.ones(1),
        log_sd=np.full(1, 0.1),
        slow=SlowRegime(probability=np.full(1, max(probability, 1e-12)), step_s=np.full(1, 10.0)),
    )
    quantiles = [float(step.quantile(q)[0]) for q in np.linspace(0.02, 0.98, 25)]
    assert quantiles == sorted(quantiles)
    assert step.median_s[0] == (1.0 if probability < 0.5 else 10.0)
    low, high = step.interval(confidence=0.9)
    assert low[0] < step.median_s[0] < high[0]
    assert (quantiles[-1] > 5.0) == (probability > 0.1)


def test_what_is_carried_over_is_nearest_and_failures_only_of_the_same():
    here = {"devices": np.array([3.0, 3.0]), "tensor_parallel": np.array([0.0, 1.0])}
    elsewhere = evidence(
        {
            "devices": np.array([9.0, 4.0, 3.0, 3.0, 6.0]),
            "tensor_parallel": np.array([0.0, 0.0, 1.0, 3.0, 0.0]),
        },
        np.array([1.0, 1.0, np.nan, np.nan, 1.0]),
        out_of_memory=np.array([False, False, True, True, False]),
    )
    assert select_most_similar(evidence=elsewhere, features=here, limit=2).measurement_ids == (
        "m1",
        "m2",
        "m4",
    )
