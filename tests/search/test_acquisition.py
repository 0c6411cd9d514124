"""The proposal rule, against brute force and by cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import fit_calibration, prior_for
from hp_tool.loop.calibration.evidence import STALL_RISK, STEP_LOG_SD
from hp_tool.loop.search.acquisition import (
    COVERED_AXES,
    Observations,
    propose,
)
from hp_tool.loop.search.improvement import expected_improvement
from tests.search.search_tables import DEVICE_BYTES, make_table, true_step_s


def next_proposal(table, observations, *, coverage_runs=0, seed=0, stored=()):
    return propose(
        table=table,
        calibration=fit_calibration(prior=prior_for(kind="gpu")),
        observations=observations,
        coverage_runs=coverage_runs,
        rng=np.random.default_rng(seed),
        stored=stored,
    )


@pytest.mark.parametrize(
    ("median", "log_sd", "best"),
    [(1.0, 0.1, 1.0), (1.5, 0.5, 1.0), (0.5, 0.05, 1.0), (2.0, 0.1, 1.0)],
)
def test_expected_improvement_matches_monte_carlo(median, log_sd, best):
    draws = median * np.random.default_rng(0).lognormal(0.0, log_sd, 2_000_000)
    expected = np.maximum(best - draws, 0.0).mean()
    value = expected_improvement(
        median_s=np.array([median]), log_sd=np.array([log_sd]), best_s=best
    )[0]
    assert value == pytest.approx(expected, rel=0.01, abs=1e-5)


def test_the_first_proposal_is_the_fastest_for_its_chance_to_fit():
    table = make_table()
    predicted = np.sum(list(table.parts_s.values()), axis=0)
    memory = fit_calibration(prior=prior_for(kind="gpu")).memory.predict(
        memory_bytes=table.memory_bytes
    )
    chance = memory.fit_probability(table.usable_bytes)
    fits = table.memory_bytes <= table.usable_bytes
    proposal = next_proposal(table, Observations())
    assert proposal.reason == "analytic_best"
    assert fits[proposal.row]
    assert predicted[proposal.row] / chance[proposal.row] == pytest.approx(
        (predicted / chance)[fits].min(), rel=1e-6
    )


def test_the_first_proposal_weighs_what_stalls_against_what_it_would_win():
    """Pipelines stall three times as often as others here: they go first where they are predicted
    to be half as fast again.
    """
    table = make_table()
    pipeline = np.array(table.axes["pipeline_parallel_size"]) > 1
    roomy = replace(
        table,
        memory_bytes=np.full(len(table), 0.1 * DEVICE_BYTES),
        layer_passes=np.ones(len(table)),
    )
    for pipelines_s, expected in ((0.9, False), (0.5, True)):
        seconds = np.where(pipeline, pipelines_s, 1.0)
        stated = {
            STEP_LOG_SD: np.full(len(table), 0.8),
            STALL_RISK: np.where(pipeline, np.log(3.0), 0.0),
        }
        proposal = next_proposal(
            replace(roomy, parts_s={"compute": seconds}, features=stated), Observations()
        )
        assert pipeline[proposal.row] == expected
        usual = (0.8**2 - assumed().step_time.regular_log_sd_limit ** 2) / (
            2 * assumed().stalls.mean_log_excess ** 2
        )
        assert proposal.hold_probability == pytest.approx(1 - usual * (3 if expected else 1))


def test_a_nearly_full_row_goes_first_where_it_is_expected_to_be_faster_and_is_tried_later_elsewhere():  # noqa: E501
    """Its allocator retries half the time, and takes five times as long then: 0.6 of its speed is
    expected of it.
    """
    table = make_table()
    full = len(table) // 2
    only = np.arange(len(table)) == full
    for seconds, first in ((0.7, False), (0.5, True)):
        even = replace(
            table,
            parts_s={"compute": np.where(only, seconds, 1.0)},
            memory_bytes=np.full(len(table), DEVICE_BYTES / 10),
            layer_passes=np.ones(len(table)),
            retry_chance=0.5 * only,
            retry_slowdown=np.where(only, 5.0, 1.0),
        )
        proposal = next_proposal(even, Observations())
        assert (proposal.row == full) == first
        other = int(not full)
        again = next_proposal(
            even, Observations(step_s={other: 1.0}, measurement_ids={other: "one"})
        )
        assert again.row == full
        assert again.hold_probability < 0.5


def test_a_row_that_is_a_little_slower_and_likelier_to_fit_goes_first():
    table = make_table()
    safest = len(table) // 2
    memory = np.full(len(table), 0.85 * DEVICE_BYTES)
    memory[safest] = 0.3 * DEVICE_BYTES
    seconds = np.where(np.arange(len(table)) == safest, 1.005, 1.0)
    even = replace(table, parts_s={"compute": seconds}, memory_bytes=memory)
    assert next_proposal(even, Observations()).row == safest


def test_a_stored_measurement_goes_first_among_those_nearly_as_good():
    table = make_table()
    best = next_proposal(table, Observations()).row
    predicted = np.sum(list(table.parts_s.values()), axis=0)
    runner_up = next_proposal(table, Observations(broken=frozenset({best}))).row
    slow = int(np.argmax(predicted))
    assert next_proposal(table, Observations(), stored={slow}).row == best
    nearly = predicted[runner_up] <= 1.05 * predicted[best]
    assert next_proposal(table, Observations(), stored={runner_up}).row == (
        runner_up if nearly else best
    )

    after = Observations(step_s={best: predicted[best]})
    usual = next_proposal(table, after)
    for row in range(len(table)):
        chosen = next_proposal(table, after, stored={row})
        assert chosen.row in (usual.row, row)
        assert chosen.expected_gain >= 0.5 * usual.expected_gain * 0.999
    assert any(
        next_proposal(table, after, stored={row}).row != usual.row for row in range(len(table))
    )


def test_what_was_tried_or_is_pending_is_not_proposed_and_the_end_is_told():
    table = make_table()
    everything = frozenset(range(len(table)))
    last = 5
    for observations in (
        Observations(pending=everything - {last}),
        Observations(broken=everything - {last}),
        Observations(step_s=dict.fromkeys(everything - {last}, 1.0)),
    ):
        assert next_proposal(table, observations).row == last
    assert next_proposal(table, Observations(step_s=dict.fromkeys(everything, 1.0))) is None


def test_coverage_makes_the_first_runs_differ_on_every_covered_axis():
    table = make_table()
    truth = true_step_s(table)
    step_s: dict[int, float] = {}
    for _ in range(4):
        proposal = next_proposal(table, Observations(step_s=step_s), coverage_runs=4)
        step_s[proposal.row] = float(truth[proposal.row])
    for axis in COVERED_AXES:
        assert len({table.axes[axis][row] for row in step_s}) > 1, axis


@pytest.mark.parametrize("coverage_runs", [0, 4])
def test_a_gain_is_a_share_of_the_best_whatever_its_seconds(coverage_runs):
    table = make_table()
    best = next_proposal(table, Observations()).row
    gains = []
    for scale in (1.0, 10.0):
        slower = replace(
            table, parts_s={name: scale * part for name, part in table.parts_s.items()}
        )
        known = Observations(step_s={best: scale * float(true_step_s(table)[best])})
        gains.append(next_proposal(slower, known, coverage_runs=coverage_runs).expected_gain)
    assert 0 < gains[0] < 1 and gains[1] == pytest.approx(gains[0], rel=0.02)


def test_a_value_that_only_crashed_waits_behind_others():
    table = make_table()
    first = next_proposal(table, Observations()).row
    crashed_t = table.axes["tensor_parallel_size"][first]
    same = [r for r, t in enumerate(table.axes["tensor_parallel_size"]) if t == crashed_t]
    proposal = next_proposal(table, Observations(broken=frozenset(same[:3])))
    assert table.axes["tensor_parallel_size"][proposal.row] != crashed_t


def test_pending_rows_lower_what_their_twins_may_win():
    table = make_table()
    predicted = np.sum(list(table.parts_s.values()), axis=0)
    slow = int(np.argmax(predicted))
    without = next_proposal(table, Observations(step_s={slow: float(predicted[slow])}))
    with_pending = next_proposal(
        table, Observations(step_s={slow: float(predicted[slow])}, pending=frozenset({without.row}))
    )
    assert with_pending.expected_gain < without.expected_gain


def test_the_seed_breaks_ties():
    table = make_table()
    table = type(table)(
        axes=table.axes,
        parts_s={"compute": np.ones(len(table))},
        layer_passes=table.layer_passes,
        memory_bytes=np.full(len(table), 0.1 * DEVICE_BYTES),
        usable_bytes=table.usable_bytes,
        device_bytes=table.device_bytes,
    )
    rows = {next_proposal(table, Observations(), seed=seed).row for seed in range(10)}
    assert len(rows) > 3
    assert (
        next_proposal(table, Observations(), seed=3).row
        == next_proposal(table, Observations(), seed=3).row
    )
