"""What a search wins is measured where both ran, with the noise of repeats; the best is confirmed,
or yours is kept.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hp_tool.domain.answer import Answer, get_verdict
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Recommendation
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.tuning import TuneResult, tune
from hp_tool.questions import schema
from hp_tool.store import open_store
from hp_tool.wording.answer import answer_sentences, answer_title, configuration_to_keep
from tests.tuning.cpu_engine import CpuEngine

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": {
        "name": "tiny",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
    "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
}
PLAIN = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "micro_batch_size": 1}


def ran(step_s: float) -> Measurement:
    times = tuple(step_s * share for share in (0.999, 1.0, 1.001))
    return Measurement(
        status="ok", step_s=step_s, step_times_s=times, wall_s=10.0, peak_memory_bytes=1 << 30
    )


def erratic(request: ProfileRequest) -> Measurement:
    """Every configuration takes its own time, and the same in each run."""
    return ran(4.0 * math.exp(random.Random(schema.to_json(request.parallel)).gauss(0.0, 0.5)))


def searched(
    tmp_path: Path, outcome: Any, parallel: dict[str, Any] | None = None, **settings: Any
) -> tuple[TuneResult, list[RunRecord]]:
    query = QUERY | {
        "parallel": parallel or {},
        "search": {"budget_runs": 6, "fidelity": "full", "steps": 3, "warmup_steps": 1} | settings,
    }
    tmp_path.mkdir(exist_ok=True)
    with_store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    result = tune(
        query=schema.parse_query(query),
        store=with_store,
        launcher=CpuEngine(num_gpus=2, outcome=outcome),
    )
    runs = with_store.runs(search_id=result.search.id)
    with_store.close()
    return result, runs


def search(
    tmp_path: Path, outcome: Any, parallel: dict[str, Any] | None = None, **settings: Any
) -> tuple[Answer, list[RunRecord]]:
    result, runs = searched(tmp_path, outcome, parallel, **settings)
    assert isinstance(result.answer, Answer)
    return result.answer, runs


def last_step_s(runs: list[RunRecord], parallel: Any) -> float:
    (*_, last) = (
        run.measurement.step_s for run in runs if run.parallel == parallel and run.measurement
    )
    assert last is not None
    return last


def test_a_gain_is_the_ratio_of_measured_steps_where_both_ran(tmp_path: Path) -> None:
    answer, runs = search(tmp_path, erratic, min_gain_fraction=0.0)
    gain = answer.gain
    assert answer.measured is not None and gain is not None and gain.source == "measured"
    assert gain.factor == pytest.approx(
        last_step_s(runs, runs[0].parallel) / last_step_s(runs, answer.parallel), rel=1e-9
    )
    assert answer.baseline is not None and answer.baseline.speedup == gain.factor
    assert gain.interval[0] < gain.factor < gain.interval[1]
    slowest = next(each for each in answer.gains if each.against == "slowest run")
    longest_s = max(last_step_s(runs, run.parallel) for run in runs)
    assert slowest.factor == pytest.approx(longest_s / last_step_s(runs, answer.parallel), rel=1e-9)
    assert slowest.source == "measured" and answer.gains[0] == gain
    assert any("slowest" in sentence for sentence in answer_sentences(answer))


def test_the_noise_is_that_of_the_search_s_own_repeats_else_an_assumed_one(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    def unsteady(request: ProfileRequest) -> Measurement:
        name = schema.to_json(request.parallel)
        seen[name] += 1
        return ran(4.0 * (1.5 if seen[name] > 1 else 1.0 + 0.01 * (sum(map(ord, name)) % 5)))

    answer, runs = search(tmp_path, unsteady)
    assert len(runs) > len({run.parallel for run in runs}), "the leader ran again"
    assert answer.gain is not None and answer.gain.noise_from == "repeats"
    assert answer.gain.noise_fraction is not None and answer.gain.noise_fraction > 0.1
    clear, _ = search(tmp_path / "..", erratic, budget_runs=2, seed=1)
    assert clear.gain is not None and clear.gain.noise_from == "assumed"
    assert clear.gain.noise_fraction == assumed().repeats.step_log_sd["cpu"]
    assert any("because no layout ran twice" in sentence for sentence in answer_sentences(clear))


def test_a_gain_over_what_did_not_run_is_predicted_and_says_so(tmp_path: Path) -> None:
    def without_one(request: ProfileRequest) -> Measurement:
        parallel = request.parallel
        if (
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.micro_batch_size,
        ) == (1, 1, 1):
            return Measurement(status="crashed", cause="no such layout", wall_s=1.0)
        return erratic(request)

    answer, _ = search(tmp_path, without_one, baseline=PLAIN)
    assert answer.gain is not None and answer.gain.against == "search.baseline"
    assert (answer.gain.source, answer.gain.noise_from, answer.gain.noise_fraction) == (
        "predicted",
        None,
        None,
    )
    claims = [each for each in answer_sentences(answer) if "the baseline" in each.lower()]
    assert claims and all("predicted" in claim for claim in claims)


def test_the_baseline_of_the_file_runs_once_after_the_first_run(tmp_path: Path) -> None:
    answer, runs = search(tmp_path, erratic, baseline=PLAIN)
    of_baseline = [
        run.number for run in runs if answer.baseline and run.parallel == answer.baseline.parallel
    ]
    assert of_baseline[0] <= 1 and runs[of_baseline[0]].predicted["chosen_by"] in (
        "baseline",
        "analytic_best",
    )
    assert answer.gain is not None and (answer.gain.against, answer.gain.source) == (
        "search.baseline",
        "measured",
    )
    assert [each.against for each in answer.gains] == [
        "search.baseline",
        "first run",
        "slowest run",
    ]
    _, alone = search(tmp_path / "..", erratic, baseline=PLAIN, budget_runs=1, seed=1)
    assert len(alone) == 1, "the budget holds"


@pytest.mark.parametrize("budget_runs", [5, 10])
def test_a_leader_within_the_noise_runs_again_before_the_end_and_the_budget_holds(
    tmp_path: Path, budget_runs: int
) -> None:
    def close(request: ProfileRequest) -> Measurement:
        return ran(4.0 * (1.0 + 0.004 * (sum(map(ord, schema.to_json(request.parallel))) % 7)))

    answer, runs = search(tmp_path, close, budget_runs=budget_runs)
    assert len(runs) <= budget_runs
    again = [run for run in runs if run.predicted["chosen_by"] == "repeat"]
    fastest = min(
        runs,
        key=lambda run: (
            run.measurement.step_s if run.measurement and run.measurement.step_s else math.inf
        ),
    )
    assert again and sum(run.parallel == fastest.parallel for run in runs) == 2
    assert not answer.clearly_better


def test_a_clear_leader_does_not_run_again(tmp_path: Path) -> None:
    fast: list[str] = []

    def far_apart(request: ProfileRequest) -> Measurement:
        fast.append(schema.to_json(request.parallel))
        return ran(2.0 if fast[0] == fast[-1] else 9.0)

    _, runs = search(tmp_path, far_apart, budget_runs=8)
    assert len(runs) >= 4 and "repeat" not in {run.predicted["chosen_by"] for run in runs}


def test_where_nothing_is_clearly_better_yours_is_kept(tmp_path: Path) -> None:
    answer, _ = search(tmp_path, lambda request: ran(4.0), baseline=PLAIN)
    assert (get_verdict(answer).state, answer.clearly_better) == ("keep", False)
    assert answer_title(answer) == "Keep your baseline" and configuration_to_keep(answer) in (
        None,
        answer.baseline.parallel,
    )
    better, _ = search(tmp_path / "..", erratic, baseline=PLAIN, seed=1, budget_runs=8)
    assert get_verdict(better).state in (
        ("use", "repeat") if better.clearly_better else ("keep", "repeat")
    )


def test_what_was_predicted_before_is_held_against_what_was_measured(tmp_path: Path) -> None:
    answer, runs = search(tmp_path, erratic)
    first = next(run for run in runs if run.parallel == answer.parallel)
    before = answer.foreseen
    assert before is not None and answer.measured is not None
    assert before.step_s == first.predicted["calibrated_step_s"]
    assert before.step_s_interval == tuple(first.predicted["calibrated_step_s_interval"])
    assert before.off_fraction == pytest.approx(answer.measured.step_s / before.step_s - 1.0)
    assert any(
        sentence.startswith("Predicted ") and " before it ran " in sentence
        for sentence in answer_sentences(answer)
    )


def test_the_baseline_runs_in_the_first_job_beside_what_the_search_chose(tmp_path: Path) -> None:
    _, runs = search(tmp_path, erratic, baseline=PLAIN, configurations_per_job=3)
    beside = [rival["chosen_by"] for rival in runs[0].predicted["rivals"]]
    assert len(beside) == 2 and beside[0] == "baseline" and "baseline" not in beside[1:]


def test_a_job_of_several_leaves_a_run_for_the_leader_again(tmp_path: Path) -> None:
    _, runs = search(tmp_path, erratic, configurations_per_job=8, budget_runs=6)
    assert len(runs[0].predicted["rivals"]) == 4
    degrees = {rival["digest"] for rival in runs[0].predicted["rivals"]}
    assert len(degrees) == 4


def test_a_baseline_that_its_job_did_not_reach_runs_alone(tmp_path: Path) -> None:
    answer, runs = search(
        tmp_path, erratic, baseline=PLAIN, configurations_per_job=3
    )  # this engine runs no rivals
    assert "baseline" in [rival["chosen_by"] for rival in runs[0].predicted["rivals"]]
    assert (
        runs[1].predicted["chosen_by"] == "baseline"
        and answer.gain is not None
        and answer.gain.source == "measured"
    )


def test_the_interval_of_what_ran_is_that_of_another_run(tmp_path: Path) -> None:
    """Two runs of a layout that differ by half are both such as another one may be."""
    seen: Counter[str] = Counter()

    def unsteady(request: ProfileRequest) -> Measurement:
        name = schema.to_json(request.parallel)
        seen[name] += 1
        return ran(
            4.0 * (1.5 if seen[name] > 1 else 1.0) * (1.0 + 0.01 * (sum(map(ord, name)) % 5))
        )

    three = PLAIN | {"micro_batch_size": [1, 2, 4], "recompute": "none", "zero_stage": 1}
    result, runs = searched(tmp_path, unsteady, parallel=three)
    answer = result.answer
    assert isinstance(answer, Answer)
    repeated = [
        row
        for row in result.recommendations
        if isinstance(row, Recommendation) and row.measured_range_s is not None
    ]
    assert repeated
    for row in repeated:
        times = [
            run.measurement.step_s
            for run in runs
            if run.parallel == row.parallel and run.measurement
        ]
        assert row.measured_range_s == (min(times), max(times)) and len(times) > 1
    assert len(runs) > 3, "one ran again"
    assert answer.measured is not None and answer.step_s_interval is not None
    low, high = answer.step_s_interval
    if answer.measured.num_runs == 1:
        assert high / low > 1.4, "the noise of the other's repeat is its noise too"
    else:
        assert low <= answer.measured.low_s and answer.measured.high_s <= high
