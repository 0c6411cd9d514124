"""What runs have cost, and what the next one is expected to."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import SearchSettings
from hp_tool.domain.records import RunRecord
from hp_tool.domain.states import RunState
from hp_tool.domain.steps import WARMUP_EXTENSION
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.search.account import run_gpu_seconds, startup_s
from hp_tool.loop.search.fidelity import EXTRAPOLATION_RATIO
from tests.search.search_engine import make_problem

SETTINGS = SearchSettings(warmup_steps=2, steps=5)


def run(
    number: int, *, wall_s: float | None, step_s: float | None, measured_steps: int = 5
) -> RunRecord:
    times = (step_s,) * measured_steps if step_s else ()
    measurement = Measurement(
        status="ok" if step_s else "crashed", step_s=step_s, step_times_s=times, wall_s=wall_s
    )
    return RunRecord(
        id=f"r{number}",
        search_id="s",
        number=number,
        digest=f"{number}",
        attempt=0,
        state=RunState.FINISHED,
        parallel=ParallelConfig(),
        fidelity=Fidelity(),
        predicted={},
        job_name=f"j{number}",
        token=1,
        measurement=measurement,
        gpu_seconds=8.0 * (wall_s or 0.0),
        created_at=datetime.now(UTC),
    )


def test_start_up_is_what_a_run_took_beside_its_steps() -> None:
    assert startup_s([run(1, wall_s=24.0, step_s=2.0)], settings=SETTINGS) == pytest.approx(
        24.0 - (2 + 5) * 2.0
    )
    early = run(1, wall_s=24.0, step_s=2.0, measured_steps=4)  # ended early, by its steps agreeing
    assert startup_s([early], settings=SETTINGS) == pytest.approx(24.0 - (2 + 4) * 2.0)


def test_start_up_is_the_median_of_the_runs_that_show_it() -> None:
    shown = [
        run(n, wall_s=7 * 1.0 + seconds, step_s=1.0) for n, seconds in enumerate((10.0, 30.0, 90.0))
    ]
    silent = [run(8, wall_s=500.0, step_s=None), run(9, wall_s=None, step_s=1.0)]
    assert startup_s([*shown, *silent], settings=SETTINGS) == pytest.approx(30.0)
    assert (
        startup_s([run(1, wall_s=5.0, step_s=1.0)], settings=SETTINGS) == 0.0
    )  # never less than nothing
    assert startup_s(silent, settings=SETTINGS) is None


def test_a_run_to_come_costs_start_up_and_every_step_on_all_its_devices() -> None:
    assert run_gpu_seconds(
        num_gpus=8, step_s=2.0, startup_s=10.0, settings=SETTINGS
    ) == pytest.approx(8 * (10.0 + (2 + 5) * 2.0))


def test_a_time_limit_is_start_up_with_slack_and_all_steps_at_their_slowest() -> None:
    problem = make_problem(warmup_steps=2, steps=5)
    predicted = {"calibrated_step_s": 51.6, "calibrated_step_s_interval": [40.0, 60.0]}
    record = replace(
        run(1, wall_s=None, step_s=None), parallel=problem.candidates.config(0), predicted=predicted
    )
    steps = 2 + WARMUP_EXTENSION + 5
    assert problem.request(record, startup_s=100.0).timeout_s == pytest.approx(
        2 * 100.0 + steps * 60.0
    )
    local_s, cluster_s, doubt = (
        getattr(assumed().search, name)
        for name in ("local_startup_s", "cluster_startup_s", "startup_doubt")
    )
    assert problem.startup_range_s() == (local_s / doubt, local_s * doubt)
    on_a_cluster = replace(problem, assumed_startup_s=cluster_s)
    assert on_a_cluster.request(record).timeout_s == pytest.approx(3 * 180.0 + steps * 60.0)
    shown = replace(on_a_cluster, startup_is_known=True)
    assert shown.request(record).timeout_s == pytest.approx(2 * 180.0 + steps * 60.0)
    half = replace(
        record,
        predicted=predicted | {"reduced_calibrated_step_s": 51.6 / 2, EXTRAPOLATION_RATIO: 2.0},
    )
    assert problem.request(half, startup_s=100.0).timeout_s == pytest.approx(
        2 * 100.0 + steps * 30.0
    )
    assert problem.request(record, startup_s=3.0).timeout_s == pytest.approx(180.0 + steps * 60.0)
    fixed = make_problem(run_timeout_s=300.0)
    assert fixed.request(record, startup_s=100.0).timeout_s == 300.0


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(
    ("setting", "imbalance", "balanced"),
    [(None, 1.0, True), (None, 1.3, False), (True, 1.3, True), (False, 1.0, False)],
)
def test_tokens_are_routed_evenly_where_that_was_asked_or_predicted(
    experts: bool, setting: bool | None, imbalance: float, balanced: bool
) -> None:
    problem = make_problem(balanced_routing=setting)
    model = (
        replace(problem.model, num_experts=8, num_experts_per_tok=2) if experts else problem.model
    )
    problem = replace(
        problem, model=model, training=replace(problem.training, expert_imbalance=imbalance)
    )
    record = replace(
        run(1, wall_s=None, step_s=None), parallel=problem.candidates.config(0), predicted={}
    )
    assert problem.request(record, startup_s=1.0).balanced_routing == (balanced and experts)
