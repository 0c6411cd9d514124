"""Searching for a way to serve with real runs: what is run, stored, learnt and recommended under a
target.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hp_tool.domain.answer import ServingAnswer
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.query import Query
from hp_tool.domain.records import REUSED
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.domain.states import SearchState
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.loop.tuning import TuneResult, resolve_search, tune
from hp_tool.loop.tuning.evidence import earlier_evidence
from hp_tool.loop.tuning.serving import build_serving
from hp_tool.questions import schema, serving
from hp_tool.store import open_store
from tests.conftest import skip_or_fail
from tests.tuning.serving_engine import FACTOR, ServingEngine

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving.yaml"


def query(**changes: Any) -> Query:
    """The example, with sections replaced or added to."""
    base = schema.parse_mapping(EXAMPLE.read_text())
    for name, value in changes.items():
        base[name] = (
            {**base[name], **value} if isinstance(base.get(name), dict) and value else value
        )
    return schema.parse_query({key: value for key, value in base.items() if value is not None})


@pytest.fixture
def store(tmp_path):
    opened = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    yield opened
    opened.close()


def rows(result: TuneResult) -> list[ServingRecommendation]:
    assert all(isinstance(row, ServingRecommendation) for row in result.recommendations)
    return list(result.recommendations)  # type: ignore[arg-type]


def test_the_best_measured_configuration_is_found_and_what_was_not_run_is_calibrated(store):
    engine = ServingEngine(num_gpus=2)
    result = tune(query=query(targets=None), store=store, launcher=engine)
    assert result.search.state is SearchState.SUCCEEDED and 4 <= result.search.profile_runs <= 6
    best, *_, last = rows(result)
    assert (
        best.measurement is not None
        and best.parallel.max_num_seqs == 8
        and best.parallel.tensor_parallel_size == 1
    )
    truth = serving.recommend(
        query=query(targets=None, parallel={"pipeline_parallel_size": 1})
    ).recommendations[0]
    assert best.parallel == replace(truth.parallel)
    for row in rows(result):
        before, after = row.estimate, row.calibrated_estimate
        assert after.request_latency_s == pytest.approx(sum(after.parts_s.values()))
        assert after.tpot_s == pytest.approx(
            FACTOR * before.tpot_s, rel=0.01 if row.measurement else 0.25
        )
        low, high = after.intervals.ttft_s
        assert low < after.ttft_s < high
        assert row.measurement is None or low <= row.measurement.load.ttft_s <= high
    assert last.calibrated_estimate.request_latency_s > best.calibrated_estimate.request_latency_s
    for request in engine.requests.values():
        assert (
            isinstance(request, InferenceRequest)
            and request.inference.concurrency == request.parallel.max_num_seqs
        )
        assert request.num_gpus == request.parallel.tensor_parallel_size


def test_a_target_rules_out_what_was_seen_to_miss_it(store):
    """Of batches that are faster for the load, the largest whose tokens still come in time is
    chosen.
    """
    every = serving.recommend(
        query=query(targets=None, parallel={"pipeline_parallel_size": 1})
    ).recommendations
    seen = sorted({FACTOR * row.estimate.tpot_s for row in every})
    limit = (seen[1] + seen[-1]) / 2
    result = tune(
        query=query(targets={"tpot_s": limit}), store=store, launcher=ServingEngine(num_gpus=2)
    )
    kept = rows(result)
    assert kept and kept[0].measurement is not None and len(kept) < len(every)
    assert all(
        row.calibrated_estimate.feasible and row.calibrated_estimate.tpot_s <= limit for row in kept
    )
    impossible = tune(
        query=query(targets={"tpot_s": seen[0] / 10}),
        store=store,
        launcher=ServingEngine(num_gpus=2),
    )
    assert impossible.recommendations == () and len(impossible.nearest_misses) > 0
    assert impossible.nearest_misses[0].calibrated_estimate.reasons[0].code == "target_missed"


def test_measurements_are_stored_apart_from_training_and_teach_the_next_search(store):
    asked = query(targets=None, search={"budget_runs": 4})
    tune(query=asked, store=store, launcher=ServingEngine(num_gpus=2))
    (series,) = {record.framework for record in store.measurements(limit=50).items}
    assert series == "megatron-core-serving"
    assert store.list_calibrations(framework=series, limit=5).items[0].payload["measurement_ids"]
    seen = {record.parallel for record in store.measurements(limit=50).items}
    again = replace(asked, search=replace(asked.search, reuse=True))
    result = tune(query=again, store=store, launcher=ServingEngine(num_gpus=2))
    runs = store.runs(search_id=result.search.id)
    row = next(
        row for row in rows(result) if row.parallel.max_num_seqs == runs[0].parallel.max_num_seqs
    )
    assert runs[0].predicted["calibrated_step_s"] == pytest.approx(
        FACTOR * row.estimate.request_latency_s, rel=0.15
    )
    assert {run.parallel for run in runs if REUSED not in run.predicted}.isdisjoint(seen) and len(
        runs
    ) > 4


def test_runs_that_only_their_owner_trusts_teach_nobody_else(store):
    asked, engine = query(targets=None, search={"budget_runs": 4}), ServingEngine(num_gpus=2)
    tune(query=asked, store=store, launcher=engine)
    for record in store.measurements(limit=50).items:
        store.set_measurement_state(measurement_id=record.id, state="excluded")
        values = {field.name: getattr(record, field.name) for field in fields(NewMeasurement)}
        store.add_measurement(
            measurement=NewMeasurement(**values | {"owner": "ada", "trusted": False})
        )
    problem = build_serving(
        query=asked, query_json=schema.to_dict(asked), hardware=engine.hardware()
    )
    learnt = {
        owner: len(earlier_evidence(store, problem, owner=owner)) for owner in ("ada", "bob", "")
    }
    assert learnt == {"ada": 4, "bob": 0, "": 0}


def test_the_result_reads_back_from_its_json(store):
    result = tune(
        query=query(search={"budget_runs": 4}), store=store, launcher=ServingEngine(num_gpus=2)
    )
    again = schema.parse(TuneResult, json.loads(schema.to_json(result)))
    assert again == result
    assert schema.parse_query(
        {**schema.query_mapping(query()), "parallel": schema.to_dict(rows(again)[0].parallel)}
    )


def test_the_answer_is_the_first_row_beside_a_baseline_that_need_not_have_run(store):
    asked = query(
        targets=None,
        cluster={"price_per_gpu_hour": 2.0},
        search={"baseline": {"tensor_parallel_size": 2, "max_num_seqs": 3}},
    )
    result = tune(query=asked, store=store, launcher=ServingEngine(num_gpus=2))
    answer, best = result.answer, rows(result)[0].calibrated_estimate
    assert isinstance(answer, ServingAnswer) and answer.measured.num_runs == 1
    assert (answer.parallel, answer.source, answer.users) == (
        rows(result)[0].parallel,
        "measured",
        16,
    )
    assert (answer.ttft_s, answer.tpot_s, answer.request_latency_s) == (
        best.ttft_s,
        best.tpot_s,
        best.request_latency_s,
    )
    baseline = answer.baseline
    assert (
        baseline.source == "search.baseline"
        and baseline.parallel.max_num_seqs == 3
        and baseline.speedup > 1.0
    )
    cost = answer.cost_per_million_output_tokens
    assert cost == pytest.approx(2.0 / 3600 / answer.output_tokens_per_second_per_gpu * 1e6)
    assert cost + baseline.saved_cost_per_million_output_tokens == pytest.approx(
        cost * baseline.speedup
    )
    slower_s = answer.request_latency_s * (baseline.speedup - 1.0)
    assert sum(baseline.saved_parts_s.values()) == pytest.approx(slower_s), "the load is closed"
    assert set(result.axes) == {"tensor_parallel_size", "max_num_seqs"}
    assert min(result.axes["max_num_seqs"].values()) == pytest.approx(best.request_latency_s)


def test_an_illegal_baseline_is_refused_by_its_field():
    with pytest.raises(InputError) as caught:
        resolve_search(query(search={"baseline": {"tensor_parallel_size": 3}}))
    assert (caught.value.field, caught.value.code) == ("search.baseline", "illegal_baseline")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"inference": {"engine": "sglang"}}, "inference.engine"),
        ({"objective": "min_gpus"}, "objective"),
        ({"targets": {"ttft_p99_s": 1.0}}, "targets.ttft_p99_s"),
        ({"parallel": {"pipeline_parallel_size": [1, 2]}}, "parallel.pipeline_parallel_size"),
        ({"inference": {"precision": "fp8"}}, "inference.precision"),
        (
            {"inference": {"concurrency": None, "request_rate_per_second": 1.0}},
            "inference.concurrency",
        ),
    ],
)
def test_what_no_run_shows_is_refused_before_a_search_is_stored(changes, field):
    with pytest.raises(UnsupportedError) as caught:
        resolve_search(query(**changes))
    assert caught.value.field == field


def test_another_launchers_hardware_is_refused(store):
    with pytest.raises(InputError) as caught:
        tune(query=query(), store=store, launcher=ServingEngine(gpu="h100-sxm-80gb", num_gpus=2))
    assert caught.value.code == "launcher_mismatch"


@pytest.mark.components
@pytest.mark.long
def test_real_runs_of_one_and_of_two_processes_end_in_a_measured_best(tmp_path, monkeypatch, store):
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="torch and megatron-core are not installed")
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    asked = query(
        inference={"input_length": 16, "output_length": 8, "concurrency": 8},
        parallel={"max_num_seqs": [1, 4]},
        search={"budget_runs": 3, "steps": 2},
        targets={"tpot_s": 60.0},
    )
    result = tune(query=asked, store=store)
    runs = store.runs(search_id=result.search.id)
    assert [run.measurement.status for run in runs] == ["ok"] * len(runs)
    assert {run.parallel.tensor_parallel_size for run in runs} == {1, 2}
    assert {run.parallel.max_num_seqs for run in runs} == {1, 4}
    best = rows(result)[0]
    assert best.measurement is not None and best.measurement.serving is not None
    rates = [run.measurement.tokens_per_second_per_gpu for run in runs]
    assert best.measurement.tokens_per_second_per_gpu == pytest.approx(max(rates), rel=0.3)
