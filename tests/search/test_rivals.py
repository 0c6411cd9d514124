"""Several configurations in one job: what each is charged, and what becomes of those that were not
reached.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from hp_tool.domain.measurement import JobResult, Measurement
from hp_tool.loop.search.account import startup_s
from hp_tool.loop.search.rivals import BESIDE, rivals_of
from tests.search.search_bench import Bench
from tests.search.search_tables import true_step_s

START_S, AGAIN_S = 30.0, 10.0


def in_turn(bench, *, reached=16, power=1.0):
    """The engine's jobs run their rivals, as far as they reach; their memory is not known. `power`:
    of the true step times.
    """

    def outcome(request):
        truth = true_step_s(bench.problem.table)

        def measured(parallel, wall_s):
            return Measurement(
                status="ok",
                step_s=float(truth[bench.problem.row(parallel)]) ** power,
                wall_s=wall_s,
            )

        first, rivals = (
            measured(request.parallel, 0.0),
            [measured(each, AGAIN_S) for each in request.rivals[:reached]],
        )
        known = {each.name: getattr(first, each.name) for each in fields(Measurement)}
        return JobResult(
            **known | {"wall_s": START_S + AGAIN_S * len(rivals), "rivals": tuple(rivals)}
        )

    bench.engine.outcome = outcome
    return bench


def test_a_job_runs_three_configurations_each_with_its_share_of_the_cost(tmp_path):
    bench = in_turn(Bench(tmp_path, configurations_per_job=3, budget_runs=7, min_gain_fraction=0.0))
    bench.engine.lasted_s = lambda handle: START_S + 2 * AGAIN_S
    assert bench.coordinator().run().stopped_because == "budget_runs"
    runs = bench.runs()
    assert len({run.digest for run in runs}) == len(runs) == 7
    assert len(bench.engine.submissions) == 3  # 3 + 3 + the last one, which the budget leaves
    beside = [BESIDE in run.predicted for run in runs]
    assert beside == [False, True, True, False, True, True, False]
    assert [run.gpu_seconds for run in runs] == pytest.approx(
        [8 * (AGAIN_S if each else START_S) for each in beside]
    )
    assert all(type(run.measurement) is Measurement for run in runs)
    # The other configurations of a job are no wait.
    assert [run.account for run in runs[:3]] == [{"queue_s": 0.0, "wall_s": START_S + 20.0}, {}, {}]
    assert startup_s(runs, settings=bench.problem.settings) > AGAIN_S  # a rival's is none


def test_a_job_is_as_large_as_the_budget_still_pays_for(tmp_path):
    pays_for = {"budget_runs": 20, "budget_gpu_seconds": 8 * 100.0, "min_gain_fraction": 0.0}
    bench = in_turn(
        Bench(tmp_path, configurations_per_job=4, **pays_for), power=3.0
    )  # the leader leads clearly
    assert bench.coordinator().run().stopped_because == "budget_gpu_seconds"
    jobs = [1 + len(rivals_of(run)) for run in bench.runs() if BESIDE not in run.predicted]
    assert jobs == [4, 2]  # 8 x (30 + 3 x 10) of 800, then 8 x (30 + 10)
    assert sum(run.gpu_seconds for run in bench.runs()) == pytest.approx(8 * 100.0)


def test_the_first_job_is_as_large_as_the_budget_is_expected_to_pay_for(tmp_path):
    bench = in_turn(
        Bench(
            tmp_path,
            configurations_per_job=4,
            budget_runs=20,
            budget_gpu_seconds=8
            * 50.0,  # 20 s of start-up and 10 s of steps, then 17 s for each other.
        )
    )
    bench.coordinator().run()
    assert len(rivals_of(bench.runs()[0])) == 1


def test_rivals_that_a_job_did_not_reach_are_asked_for_again(tmp_path):
    bench = in_turn(
        Bench(tmp_path, configurations_per_job=4, budget_runs=8, min_gain_fraction=0.0), reached=1
    )
    bench.coordinator().run()
    runs = bench.runs()
    assert len(runs) == 8
    first = runs[0]
    lost = [rival["digest"] for rival in rivals_of(first)][1:]
    assert len(lost) == 2
    assert set(lost) & {run.digest for run in runs[2:]}


def test_nobody_else_proposes_what_a_job_under_way_will_run(tmp_path):
    bench = in_turn(
        Bench(
            tmp_path,
            configurations_per_job=3,
            parallel_runs=2,
            budget_runs=6,
            min_gain_fraction=0.0,
        )
    )
    bench.coordinator().run()
    runs = bench.runs()
    assert len({run.digest for run in runs}) == len(runs) == 6
    asked = [
        digest
        for run in runs
        for digest in (run.digest, *(each["digest"] for each in rivals_of(run)))
    ]
    assert len(asked) == len(set(asked)) + sum(BESIDE in run.predicted for run in runs)


def test_jobs_are_of_configurations_whose_processes_are_alike(tmp_path):
    bench = in_turn(
        Bench(tmp_path, configurations_per_job=3, budget_runs=12, min_gain_fraction=0.0)
    )
    bench.coordinator().run()
    job_of = {run.id: run for run in bench.runs()}
    beside = [
        (run, job_of[run.predicted[BESIDE]]) for run in bench.runs() if BESIDE in run.predicted
    ]
    assert beside
    assert all(
        (one.parallel.tensor_parallel_size > 1) == (job.parallel.tensor_parallel_size > 1)
        for one, job in beside
    )


def test_graphs_outlive_their_model_so_such_jobs_run_one(tmp_path):
    problem = Bench(tmp_path, configurations_per_job=3).problem
    assert problem.configurations_per_job == 3
    assert (
        replace(
            problem, training=replace(problem.training, cuda_graphs=True)
        ).configurations_per_job
        == 1
    )
