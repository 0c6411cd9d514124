"""Layouts that ran on this cluster are preferred, fit, and are shown with what was measured."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import pytest

import hp_tool
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.measurement_records import MeasurementRecord
from hp_tool.loop.calibration import fit_calibration
from hp_tool.loop.learning.outcomes import find_successes
from hp_tool.loop.learning.reports import read_report
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.calibrated import CalibratedPredictor
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.exact import NEAR_RATIO_MEASURED
from tests.learning.machine import report
from tests.learning.test_crashes import QUERY

LAYOUT = {"tensor_parallel_size": 2, "context_parallel_size": 2, "recompute": "selective"}


@pytest.fixture
def ranking(http):
    """The rows of a ranking, after a fit of what was measured by then."""

    def rows(top: int) -> list[dict[str, Any]]:
        assert http.post("/v1/calibrations").status_code == 201
        answer = http.post("/v1/recommendations", json=QUERY, params={"top": top})
        return answer.json()["recommendations"]

    return rows


def measure(http, row, *, times: float = 1.0) -> float:
    """Report that the row's layout takes `times` as long as predicted; return its seconds."""
    step_s = times * row["estimate"]["time"]["step_s"]
    parallel = {name: value for name, value in row["parallel"].items() if value is not None}
    body = {"query": QUERY, "parallel": parallel, "measurement": {"step_s": step_s}}
    answer = http.post("/v1/measurements", json=body)
    assert answer.status_code == 201, answer.text
    return step_s


def test_a_layout_that_ran_within_four_percent_is_rank_1_and_fits(http, ranking):
    first, *others = ranking(10)
    # The others keep their risk of running out of memory, which one that ran does not have.
    row = next(
        row
        for row in others
        if 1.02 < row["estimate"]["time"]["step_s"] / first["expected_step_s"] < 1.04
    )
    step_s = measure(http, row)
    best = ranking(1)[0]
    assert best["parallel"] == row["parallel"] != first["parallel"]
    known = best["calibrated_estimate"]
    assert best["out_of_memory_probability"] == known["out_of_memory_probability"] == 0.0
    assert known["provenance"]["measured"] == {"runs": 1, "step_s": pytest.approx(step_s)}
    fastest = ranking(2)[1]
    assert fastest["expected_step_s"] < best["expected_step_s"]
    assert "measured" not in fastest["calibrated_estimate"]["provenance"]


def test_a_slower_layout_that_ran_takes_the_last_row_of_a_tie(http, ranking):
    rows = ranking(40)
    first_s = rows[0]["expected_step_s"]
    row = next(
        row
        for row in rows
        if row["group"] == 1 and row["expected_step_s"] > (NEAR_RATIO_MEASURED + 0.03) * first_s
    )
    measure(http, row)
    *faster, last = ranking(3)
    assert last["parallel"] == row["parallel"] and last["rank"] == 3
    assert all(each["parallel"] != row["parallel"] for each in faster)
    assert all(each["expected_step_s"] < last["expected_step_s"] for each in faster)


def test_the_number_of_runs_and_their_median_are_kept(http, ranking):
    row = ranking(1)[0]
    seconds = sorted(measure(http, row, times=times) for times in (1.0, 1.3, 1.1))
    measured = ranking(1)[0]["calibrated_estimate"]["provenance"]["measured"]
    assert measured == {"runs": 3, "step_s": pytest.approx(seconds[1])}


def test_another_exchange_or_another_batch_did_not_run():
    new = read_report(json.dumps(report(LAYOUT, query=QUERY)).encode(), source="file")
    values = {field.name: getattr(new, field.name) for field in fields(new)}
    now = datetime.now(tz=UTC)
    record = MeasurementRecord(**values, id="1", digest="2", created_at=now)
    problem = resolve_training(parse_query(record.query))
    predictor = CalibratedPredictor(
        calibration=fit_calibration(), ran=find_successes([(problem, [record])])
    )
    candidates = Candidates.from_configs(
        [record.parallel, replace(record.parallel, micro_batch_size=2)]
    )
    assert predictor.measured(candidates, problem=problem).tolist() == [True, False]
    strategy = replace(problem.strategy, context_parallel_communication="all_gather")
    larger = replace(problem.workload, global_batch_size=64)
    for other in (replace(problem, strategy=strategy), replace(problem, workload=larger)):
        assert not predictor.measures(other)
        assert not predictor.measured(candidates, problem=other).any()


def test_a_calibrated_answer_has_one_set_of_figures(http, ranking):
    row = ranking(1)[0]
    measure(http, row, times=1.2)
    ranking(1)
    parallel = {name: value for name, value in row["parallel"].items() if value is not None}
    open_query = QUERY | {"training": QUERY["training"] | {"cuda_graphs": None}}
    answer = http.post("/v1/estimates", json=open_query | {"parallel": parallel}).json()
    alone, known = answer["estimate"], answer["calibrated_estimate"]
    assert known["time"]["step_s"] > 1.05 * alone["time"]["step_s"]
    for each in (alone, known):
        assert sum(each["time"]["parts_s"].values()) == pytest.approx(each["time"]["step_s"])
    assert alone["narrowest"] is alone["with_recipe"] is known["narrowest"] is None
    plain = hp_tool.estimate(open_query | {"parallel": parallel}).estimate.with_recipe
    assert plain is not None
    ratio = known["with_recipe"]["step_s"] / plain.step_s
    assert ratio == pytest.approx(known["time"]["step_s"] / alone["time"]["step_s"], rel=0.1)
    assert ratio > 1.05
