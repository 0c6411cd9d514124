"""The answer of a search in figures and in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.domain.answer import (
    Answer,
    Baseline,
    Foreseen,
    Gain,
    Repeats,
    ServingAnswer,
    ServingBaseline,
    get_verdict,
)
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.serving import ServingConfig
from hp_tool.loop.tuning.answer import effect_of_axes
from hp_tool.loop.tuning.searched import tied
from hp_tool.wording.answer import (
    answer_headline,
    answer_sentences,
    answer_title,
    configuration_to_keep,
    disagreement_words,
    explain_change,
    gains_words,
    prediction_check_words,
    stop_reason,
)

RUNS = Repeats(run_id="r", step_s=5.18, num_runs=2, low_s=4.18, high_s=5.18, reduced=False)
BASELINE = Baseline(
    parallel=ParallelConfig(tensor_parallel_size=4),
    source="search.baseline",
    step_s=4.85,
    speedup=1.31,
    saved_days=3.0,
    saved_cost=12_345.0,
    saved_parts_s={"tensor_parallel": 1.4, "pipeline_bubble": -0.25, "optimizer": 0.001},
)
MEASURED = {"source": "measured", "noise_from": "assumed", "noise_fraction": 0.03}
ANSWER = Answer(
    parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
    step_s=3.7,
    step_s_interval=(3.6, 3.9),
    source="calibrated",
    known_from_runs=4,
    measured=RUNS,
    outside=True,
    as_good=5,
    free_memory_bytes=6 * 2**30,
    out_of_memory_probability=0.02,
    baseline=BASELINE,
    clearly_better=True,
    gain=Gain(against="search.baseline", factor=1.31, interval=(1.2, 1.43), **MEASURED),
)


def test_all_that_is_known_is_said_and_nothing_else():
    assert answer_headline(ANSWER) == (
        "3.70 s per step (3.60 s to 3.90 s, calibrated by 4 runs), 1.31 times your baseline's "
        "speed (1.20 to 1.43, measured), "
        "saves $12,345 over the training, 6.0 GiB of memory expected to stay free, 2% chance of "
        "running out of memory"
    )
    assert explain_change(ANSWER) == (
        "Compared with the baseline, TP 4 → 2, PP 1 → 2: predicted 1.40 s less "
        "tensor-parallel communication, "
        "250.0 ms more pipeline bubble."
    )
    alone = replace(
        ANSWER,
        baseline=None,
        gain=None,
        clearly_better=None,
        free_memory_bytes=-1.0,
        out_of_memory_probability=0.0,
        outside=False,
        as_good=0,
    )
    assert answer_sentences(alone) == [
        "3.70 s per step (3.60 s to 3.90 s, calibrated by 4 runs).",
        "Measured 5.18 s in the last of 2 runs (4.18-5.18 s).",
    ]
    unclear = replace(
        ANSWER,
        gain=Gain(against="search.baseline", factor=1.03, interval=(0.95, 1.12)),
        clearly_better=False,
        outside=False,
    )
    assert (
        configuration_to_keep(unclear) == BASELINE.parallel
        and configuration_to_keep(ANSWER) is None
    )
    decision, figures, *_ = answer_sentences(unclear)
    assert answer_title(unclear) == "Keep your baseline"
    assert decision == (
        "The fastest layout has 1.03 times your baseline's speed (0.95 to 1.12, predicted), which "
        "is not clearly faster."
    )
    assert "speed" not in figures and "saves" not in figures
    days = replace(ANSWER, baseline=replace(BASELINE, saved_cost=None))
    assert "saves 3.0 days of training" in answer_headline(days)


def test_the_gain_over_the_slowest_and_where_the_noise_comes_from_are_said():
    slowest = Gain(against="slowest run", factor=2.6, interval=(2.4, 2.8), **MEASURED)
    assert gains_words(replace(ANSWER, gains=(ANSWER.gain, slowest))) == (
        "It has 2.60 times the slowest run's speed (2.40 to 2.80). Speeds are ratios of mean "
        "measured step times with 3% run-to-run noise (assumed, because no layout ran twice)."
    )
    repeated = replace(ANSWER.gain, noise_from="repeats", noise_fraction=0.12)
    assert gains_words(replace(ANSWER, gain=repeated, gains=(repeated,))) == (
        "Speeds are ratios of mean measured step times with 12% run-to-run noise (from repeated "
        "runs and the usual noise)."
    )


def test_a_baseline_that_was_the_slowest_is_named_once():
    same = replace(ANSWER.gain, against="slowest run")
    words = gains_words(replace(ANSWER, gains=(ANSWER.gain, same)))
    assert words is not None and words.startswith("The slowest run was your baseline. Speeds are")


def test_a_prediction_is_held_against_what_was_measured():
    before = Foreseen(step_s=4.0, step_s_interval=(3.0, 5.0), known_from_runs=2, off_fraction=0.295)
    assert prediction_check_words(replace(ANSWER, foreseen=before)) == (
        "Predicted 4.00 s before it ran (3.00 s to 5.00 s), measured 5.18 s: 30% slower, outside "
        "the interval."
    )
    assert prediction_check_words(ANSWER) is None


def test_several_runs_outweigh_a_calibration_that_they_contradict():
    several = replace(ANSWER, calibrated_step_s_interval=(3.6, 3.9))
    assert answer_title(several) == "Use this configuration"
    assert disagreement_words(several) == (
        "Its runs contradict the calibrated prediction of 3.60 s to 3.90 s and count more."
    )
    assert disagreement_words(replace(several, outside=False)) is None


ONCE = replace(RUNS, num_runs=1, low_s=5.18)
CLEAR = Gain(against="search.baseline", factor=1.31, interval=(1.2, 1.43), **MEASURED)
UNCLEAR = replace(CLEAR, factor=1.03, interval=(0.95, 1.12))
FIRST = replace(BASELINE, source="first run")
SLOWEST = replace(CLEAR, against="slowest run")
AGREES = {"outside": False, "calibrated_step_s_interval": (3.6, 3.9)}
OPEN = {"measured": ONCE, "step_s_interval": (2.0, 4.1)}
STATES = {
    "use": [
        {**AGREES, "gain": CLEAR},
        {**AGREES, "gain": CLEAR, **OPEN},
        {**AGREES, "gain": None, "baseline": None, "as_good": 0},
        {**AGREES, "gain": SLOWEST, "baseline": FIRST, "as_good": 0},
    ],
    "keep": [
        {**AGREES, "gain": UNCLEAR},
        {**AGREES, "gain": SLOWEST, "baseline": replace(BASELINE, parallel=ANSWER.parallel)},
    ],
    "tied": [
        {**AGREES, "gain": UNCLEAR, "baseline": FIRST},
        {**AGREES, "gain": None, "baseline": None},
        {**AGREES, "gain": SLOWEST, "baseline": FIRST},
    ],
    "repeat": [
        {"measured": ONCE, "calibrated_step_s_interval": (1.48, 2.49)},
        {**AGREES, **OPEN, "gain": UNCLEAR},
        {**AGREES, **OPEN, "gain": None, "baseline": None},
    ],
    "unmeasured": [{"measured": None, "outside": False}],
}


@pytest.mark.parametrize(
    ("state", "facts"), [(state, facts) for state in STATES for facts in STATES[state]]
)
def test_states_of_a_verdict_exclude_each_other(state: str, facts: dict[str, Any]) -> None:
    """No two sentences of an answer contradict each other: each state rules out what others say."""
    answer = replace(ANSWER, **facts)
    assert get_verdict(answer).state == state
    assert get_verdict(replace(answer, verdict=get_verdict(answer))) == get_verdict(answer)
    text = " ".join(
        [
            answer_title(answer),
            *answer_sentences(answer),
            stop_reason("no_expected_gain", get_verdict(answer).state),
        ]
    )
    says = {
        "use": "Use this configuration" in text,
        "keep": "Keep your" in text,
        "tied": "No clear winner" in text,
        "repeat": "again" in text,
        "unmeasured": "did not run" in text or "No run succeeded" in text,
    }
    assert [each for each in says if says[each]] == [state]
    if state == "repeat":
        assert "unlikely to help" not in text and "may be as fast" not in text
    if state != "use":
        assert "saves" not in text
    kept_one = get_verdict(answer).parallel
    assert kept_one == (answer.baseline.parallel if state == "keep" else answer.parallel)


def test_the_answer_of_a_serving_search_says_latencies_users_and_price():
    baseline = ServingBaseline(
        parallel=ServingConfig(tensor_parallel_size=2, max_num_seqs=8),
        source="search.baseline",
        speedup=1.5,
        output_tokens_per_second_per_gpu=200.0,
        saved_cost_per_million_output_tokens=0.25,
        saved_parts_s={"queue": 0.4, "prefill": -0.1, "decode": 0.001},
    )
    group = Repeats(run_id="r", step_s=0.85, num_runs=1, low_s=0.85, high_s=0.85, reduced=False)
    answer = ServingAnswer(
        parallel=ServingConfig(max_num_seqs=16),
        ttft_s=0.323,
        ttft_s_interval=None,
        tpot_s=0.0168,
        tpot_s_interval=None,
        request_latency_s=0.85,
        output_tokens_per_second_per_gpu=300.0,
        users=16,
        cost_per_million_output_tokens=0.5,
        source="measured",
        known_from_runs=4,
        measured=group,
        as_good=1,
        baseline=baseline,
        gain=Gain(against="search.baseline", factor=1.5, interval=(1.4, 1.6), **MEASURED),
        clearly_better=True,
    )
    assert answer_sentences(answer) == [
        "323.0 ms to the first token and 16.8 ms per output token, calibrated by 4 runs, 300 "
        "output tokens/s per GPU, "
        "16 users, $0.5 per million output tokens, 1.50 times your baseline's speed for a request "
        "(1.40 to 1.60, measured), "
        "saves $0.25 per million output tokens.",
        "Request latency: measured 850.0 ms in one run; 1 other layout may be as fast.",
        "Compared with the baseline, TP 2 → 1, max_num_seqs 8 → 16: predicted 400.0 ms less queue, "
        "100.0 ms more prefill.",
    ]
    unseen = replace(
        answer,
        source="calibrated",
        measured=None,
        ttft_s_interval=(0.3, 0.35),
        as_good=0,
        baseline=None,
        users=None,
        gain=None,
    )
    assert answer_sentences(
        replace(unseen, cost_per_million_output_tokens=None, baseline=None)
    ) == [
        "This layout did not run.",
        "323.0 ms (300.0 ms to 350.0 ms) to the first token and 16.8 ms per output token, "
        "calibrated by 4 runs, 300 output "
        "tokens/s per GPU.",
    ]


def test_rows_within_the_noise_are_as_good():
    known_s, log_sd = np.array([1.0, 1.02, 1.3, 1.02, 0.99]), np.array([0.01, 0.01, 0.01, 0.0, 0.2])
    assert tied([0, 1, 2, 3, 4], seconds=known_s, log_sd=log_sd) == [1, 4]
    log_sd[0] = 0.05
    assert tied([0, 1, 2, 3, 4], seconds=known_s, log_sd=log_sd) == [1, 3, 4]


def test_an_axis_costs_what_the_best_with_its_value_is_slower():
    axes = {"tensor_parallel_size": (1, 1, 2), "zero_stage": (1, 1, 1)}
    effects = effect_of_axes(axes, [0, 1, 2], np.array([3.0, 2.0, 4.0]))
    assert effects == {"tensor_parallel_size": {"1": 2.0, "2": pytest.approx(4.0)}}
