"""Corrected costs are costs: parts sum, rates follow, and knowing nothing changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.loop.calibration import fit_calibration
from hp_tool.loop.learning.evidence import evidence_of
from hp_tool.loop.learning.reports import read_report
from hp_tool.questions import schema, training
from hp_tool.questions.answers import answer_lines
from hp_tool.questions.training.calibrated import CalibratedPredictor
from hp_tool.questions.training.evaluate import resolve_config
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.rank import cost_space
from tests.learning.machine import CONFIGURATIONS, QUERY, report
from tests.learning.only import Only


@pytest.fixture(scope="module")
def problem():
    return resolve_training(schema.parse_query(QUERY))


@pytest.fixture(scope="module")
def candidates():
    asked = [
        schema.parse_query(QUERY | {"parallel": parallel}).parallel for parallel in CONFIGURATIONS
    ]
    return Candidates.from_configs(resolve_config(parallel, num_gpus=16) for parallel in asked)


@pytest.fixture(scope="module")
def learnt(problem, candidates):
    rows = []
    for number, parallel in enumerate(CONFIGURATIONS):
        new = read_report(schema.to_json(report(parallel)).encode(), source="file")
        values = {name: getattr(new, name) for name in ("parallel", "measurement")}
        rows.append(type("Record", (), {"id": str(number), **values})())
    return fit_calibration(evidence=evidence_of(rows, problem=problem))


def test_knowing_nothing_changes_nothing(problem, candidates):
    costs = problem.costs(candidates)
    same = CalibratedPredictor(calibration=fit_calibration()).costs(
        costs, candidates=candidates, problem=problem
    )
    np.testing.assert_allclose(same.step_s, costs.step_s, rtol=1e-12)
    np.testing.assert_allclose(same.memory_total_bytes, costs.memory_total_bytes, rtol=1e-12)


def test_corrected_parts_sum_to_corrected_totals(problem, candidates, learnt):
    costs = CalibratedPredictor(calibration=learnt).costs(
        problem.costs(candidates), candidates=candidates, problem=problem
    )
    np.testing.assert_allclose(np.sum(list(costs.parts.values()), axis=0), costs.step_s)
    np.testing.assert_allclose(
        np.sum(list(costs.memory_parts.values()), axis=0), costs.memory_total_bytes
    )
    measured = [report(parallel)["measurement"]["step_s"] for parallel in CONFIGURATIONS]
    np.testing.assert_allclose(
        costs.step_s, measured, rtol=0.1
    )  # the prior doubts communication 1.8 times as slow


def test_a_corrected_estimate_is_one_row_of_the_corrected_costs(problem, candidates, learnt):
    costs = problem.costs(candidates)
    whole = CalibratedPredictor(calibration=learnt).costs(
        costs, candidates=candidates, problem=problem, residuals=True
    )
    for row in range(len(candidates)):
        predictor = CalibratedPredictor(calibration=learnt)
        one = predictor.estimate(row, costs=costs, candidates=candidates, problem=problem)
        assert one.time.step_s == pytest.approx(whole.step_s[row])
        assert one.memory.total_bytes == pytest.approx(whole.memory_total_bytes[row])
        assert one.feasible == bool(whole.feasible[row])
        low, high = one.intervals.step_s
        assert low < one.time.step_s < high
        assert one.tokens_per_second == pytest.approx(32 * 4096 / one.time.step_s)


def test_what_is_learnt_can_make_a_configuration_infeasible(problem, candidates, learnt):
    """The verdict belongs to the corrected bytes: what just fits by the cost model needs 5% more
    here.
    """
    costs = problem.costs(candidates)
    row = int(np.argmax(costs.memory_total_bytes))
    headroom = 1.0 - 1.01 * float(costs.memory_total_bytes[row]) / problem.cluster.gpu.memory_bytes
    tight = replace(
        problem, constraints=replace(problem.constraints, memory_headroom_fraction=headroom)
    )
    costs = tight.costs(candidates)
    assert costs.feasible[row]
    predictor = CalibratedPredictor(calibration=learnt)
    one = predictor.estimate(row, costs=costs, candidates=candidates, problem=tight)
    assert not one.feasible
    assert one.reasons[0].code == "memory"


def test_what_ran_slow_here_loses_its_place_among_configurations_alike(problem, candidates):
    """No factor explains one configuration that is a third slower than the rest: what is known of
    those alike does.
    """
    usual = {
        "recompute": ["none", "selective", "full"],
        "zero_stage": [0, 1],
        "data_parallel_shard_size": 0,
    }
    query = schema.parse_query(
        QUERY | {"rank_by": "mean", "parallel": usual | {"context_parallel_size": 1}}
    )
    shown = training.recommend(query=query, top=5).recommendations
    first = min(shown, key=lambda row: row.estimate.time.step_s).parallel
    slow = report(schema.to_dict(first))
    slow["measurement"]["step_s"] *= 1.35
    rows = []
    for number, told in enumerate([slow, *(report(parallel) for parallel in CONFIGURATIONS)] * 3):
        new = read_report(schema.to_json(told).encode(), source="file")
        values = {name: getattr(new, name) for name in ("parallel", "measurement")}
        rows.append(type("Record", (), {"id": str(number), **values})())
    predictor = CalibratedPredictor(
        calibration=fit_calibration(evidence=evidence_of(rows, problem=problem))
    )

    one = Candidates.from_configs([first])
    found = predictor.estimate(0, costs=problem.costs(one), candidates=one, problem=problem)
    assert found.time.step_s == pytest.approx(slow["measurement"]["step_s"], rel=0.1)
    ranked = training.recommend(query=query, top=40, calibrations=Only(predictor)).recommendations
    steps = [row.calibrated_estimate.time.step_s for row in ranked]
    assert steps[1:] == sorted(steps[1:]) and steps[0] <= 1.01 * min(steps)
    assert ranked[0].parallel != first


def test_lines_of_a_batch_are_corrected_as_each_is_alone(learnt):
    lines = [
        schema.to_json(schema.parse_query(QUERY | {"parallel": parallel})).encode()
        for parallel in CONFIGURATIONS
    ] * 2
    told = {
        "task": "estimate",
        "top": 1,
        "calibrations": lambda problem: CalibratedPredictor(calibration=learnt),
    }
    answers = answer_lines(lines, **told)
    assert answers == [answer_lines([line], **told)[0] for line in lines]
    assert all('"calibrated_estimate":{' in answer for answer in answers)


def test_on_two_kinds_of_gpu_each_estimate_keeps_the_capacity_of_its_own_fullest_kind():
    stages = [{"gpu": "a100-sxm-40gb", "num_gpus": 8}, {"gpu": "h100-sxm-80gb", "num_gpus": 8}]
    query = schema.parse_query(QUERY | {"model": "llama-2-7b", "cluster": {"stages": stages}})
    problem = resolve_training(query)
    candidates = cost_space(problem=problem).candidates
    costs = problem.costs(candidates)
    row = int(np.flatnonzero(costs.capacity_bytes != costs.capacity_bytes[0])[0])
    predictor = CalibratedPredictor(calibration=fit_calibration())
    estimate = predictor.estimate(row, costs=costs, candidates=candidates, problem=problem)
    assert estimate.memory.capacity_bytes == costs.capacity_bytes[row]
    assert estimate.provenance["layers_per_stage"] == [
        [kind["gpu"], int(layers[row])]
        for kind, layers in zip(stages, costs.layers_by_kind, strict=True)
    ]
