"""Searches that measure cheaply first, on an engine whose steps take what the cost model says,
times a factor.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.errors import InputError
from hp_tool.loop.search.fidelity import num_gpus
from hp_tool.loop.tuning import tune
from hp_tool.loop.tuning.reductions import Reducer
from hp_tool.questions import schema
from hp_tool.questions.training.problem import resolve_training
from hp_tool.store import open_store
from tests.tuning.cpu_engine import FACTOR, CpuEngine

QUERY = schema.parse_query(
    {
        "kind": "training",
        "model": {
            "name": "gpt-wide",
            "num_hidden_layers": 8,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "vocab_size": 4096,
        },
        "cluster": {"gpu": "cpu", "num_gpus": 16, "gpus_per_node": 16},
        "training": {"sequence_length": 512, "global_batch_size": 512},
        "parallel": {"recompute": ["none", "full"], "zero_stage": 1},
        "search": {"budget_runs": 8, "steps": 5},
    }
)


@pytest.fixture
def store(tmp_path):
    opened = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    yield opened
    opened.close()


def full(query):
    return replace(query, search=replace(query.search, fidelity="full"))


def test_reduced_runs_cost_less_and_the_best_is_run_whole(store):
    result = tune(query=QUERY, store=store, launcher=CpuEngine(num_gpus=16))
    runs = store.runs(search_id=result.search.id)
    small = [run for run in runs if not run.fidelity.is_whole]
    assert len(small) == result.search.reduced_runs > 0
    for run in small:
        assert run.measurement.fidelity == run.fidelity
        low, high = run.measurement.extrapolated_step_s_interval
        assert low < run.measurement.extrapolated_step_s < high
        assert run.gpu_seconds == pytest.approx(10.0 * num_gpus(run.parallel, run.fidelity))
    best = result.recommendations[0]
    assert best.measurement is not None and best.measurement.fidelity.is_whole
    assert best.measurement.step_s == pytest.approx(FACTOR * best.estimate.time.step_s, rel=1e-6)
    assert len(runs) <= QUERY.search.budget_runs
    whole = tune(query=full(QUERY), store=store, launcher=CpuEngine(num_gpus=16))
    assert whole.search.reduced_runs == 0
    assert (
        result.search.gpu_seconds / result.search.profile_runs
        < whole.search.gpu_seconds / whole.search.profile_runs
    )
    assert result.search.expected_gain_fraction is not None


def test_the_best_is_not_run_whole_where_that_would_overdraw_the_gpu_seconds(store):
    """A reduced run on 1 or 2 devices takes 10 or 20 device seconds, a whole one on 16 takes
    160.
    """
    query = replace(QUERY, search=replace(QUERY.search, budget_gpu_seconds=100.0))
    result = tune(query=query, store=store, launcher=CpuEngine(num_gpus=16))
    assert result.search.reduced_runs == result.search.profile_runs > 1
    assert result.search.gpu_seconds <= 100.0


def test_a_launcher_with_fewer_devices_measures_what_it_can_and_extrapolates(store):
    result = tune(query=QUERY, store=store, launcher=CpuEngine(num_gpus=4))
    runs = store.runs(search_id=result.search.id)
    assert runs and all(not run.fidelity.is_whole for run in runs)
    assert max(num_gpus(run.parallel, run.fidelity) for run in runs) <= 4
    best = result.recommendations[0]
    assert best.measurement.extrapolated_step_s == pytest.approx(
        FACTOR * best.estimate.time.step_s, rel=0.15
    )
    assert result.rejections["not_profiled"] > 0


def test_what_not_even_the_smallest_run_fits_on_is_refused(store):
    for launcher, query in ((CpuEngine(num_gpus=1), QUERY), (CpuEngine(num_gpus=4), full(QUERY))):
        with pytest.raises(InputError) as caught:
            tune(query=query, store=store, launcher=launcher)
        assert caught.value.code == "launcher_mismatch"


def test_several_runs_at_a_time_are_all_different_and_stay_in_the_budget(store):
    query = replace(
        full(QUERY),
        search=replace(QUERY.search, fidelity="full", parallel_runs=3, min_gain_fraction=0.0),
    )
    open_at_once = []

    class Counting(CpuEngine):
        def poll(self, handles):
            open_at_once.append(len(handles := list(handles)))
            return super().poll(handles)

    result = tune(query=query, store=store, launcher=Counting(num_gpus=16))
    runs = store.runs(search_id=result.search.id)
    assert max(open_at_once) == 3
    assert len({run.digest for run in runs}) == len(runs) == query.search.budget_runs


def test_a_later_search_learns_from_reduced_runs_what_they_were(store):
    tune(query=QUERY, store=store, launcher=CpuEngine(num_gpus=4))
    calibration = store.list_calibrations().items[0].payload
    assert calibration["accuracy"]["error_before"] == pytest.approx(1 - 1 / FACTOR, abs=0.02)
    assert calibration["accuracy"]["error_after"] < 0.1


def test_a_leader_whose_whole_run_fails_is_not_recommended(store):
    """Every whole run is out of memory: what reduced runs implied of those configurations is worth
    nothing.
    """

    def outcome(request):
        return (
            Measurement(status="oom", cause="out of memory", wall_s=1.0)
            if request.num_gpus == 16
            else None
        )

    result = tune(query=QUERY, store=store, launcher=CpuEngine(num_gpus=16, outcome=outcome))
    runs = store.runs(search_id=result.search.id)
    failed = {run.parallel for run in runs if run.measurement.status == "oom"}
    assert failed
    assert not failed & {row.parallel for row in result.recommendations}


def test_more_processes_than_cores_slow_the_whole_run_down_by_what_they_share():
    """16 processes on 4 cores take four times as long as the 2 of a reduced run, which have a core
    each.
    """
    problem = resolve_training(QUERY)
    config = ParallelConfig(data_parallel_size=16)
    assert Reducer(problem=problem, available_gpus=16)(config).crowding == 1.0
    assert Reducer(problem=problem, available_gpus=16, cores=4.0)(config).crowding == 4.0
