"""Calibrate memory with a few published peaks and score the predictions of the other peaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.runs import b200_cases, memory_cases, mlperf_cases
from benchmarks.learning.sets import CARDS, RunSet, build_set
from benchmarks.learning.trials import (
    LEAST_TESTED,
    RUNS,
    Predictions,
    Rows,
    mean_scores,
    random_orders,
    score,
)
from evidence.cases import Case
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.uncertainty import intervals, unmeasured_features
from hp_tool.loop.calibration import prior_for
from hp_tool.loop.calibration.memory import fit_memory
from hp_tool.questions.training.evaluate import resolve_configuration

LEAST_ROWS = 12
"""Minimum number of peaks in a set. Few peaks are published; most of the 12 by MLPerf on B200 are
one setting.
"""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """n runs with a measured peak, and the interval that the cost model states for each."""

    runs: RunSet
    low_bytes: NDArray[np.float64]
    high_bytes: NDArray[np.float64]


def peak_sets(folder: Path) -> Iterator[Peaks]:
    """Return every set of at least LEAST_ROWS runs on one GPU."""
    sources = {
        "Cut models": b200_cases(folder),
        "MLPerf": mlperf_cases(folder),
        "InternEvo": memory_cases(folder),
    }
    for source, cases in sources.items():
        known = [case for case in cases if case.allocated_bytes or case.used_bytes]
        for card in dict.fromkeys(case.card for case in known):
            same = [case for case in known if case.card == card]
            if len(same) >= LEAST_ROWS:
                yield _peaks(f"{source} {CARDS.get(card, card)}", same)


def _peaks(name: str, cases: Sequence[Case]) -> Peaks:
    runs = build_set(name, cases)
    measured = np.array(
        [case.allocated_bytes or case.used_bytes for case in cases], dtype=np.float64
    )
    bounds = np.array([_bounds(case) for case in cases]) * runs.evidence.memory_bytes[:, None]
    evidence = replace(runs.evidence, measured_memory_bytes=measured)
    return Peaks(
        runs=replace(runs, evidence=evidence), low_bytes=bounds[:, 0], high_bytes=bounds[:, 1]
    )


def _bounds(case: Case) -> tuple[float, float]:
    """Return the bounds of the stated interval, divided by the prediction."""
    resolved = resolve_configuration(case.query)
    unmeasured = unmeasured_features(
        case=resolved.problem, candidate=Candidates.alone(resolved.config)
    )
    stated = intervals(
        step_s=1.0, memory_total_bytes=1.0, case=resolved.problem, unmeasured=unmeasured
    )
    return (
        stated.memory_total_bytes
        if case.allocated_bytes
        else stated.memory_reserved_bytes or stated.memory_total_bytes
    )


def compare(peaks: Peaks, taught: Rows, tested: Rows) -> dict[str, Any]:
    """Return scores by method on the tested rows."""
    seen, unseen = (peaks.runs.evidence.take(rows) for rows in (taught, tested))
    prediction = fit_memory(evidence=seen, prior=prior_for(kind="gpu")).predict(
        memory_bytes=unseen.memory_bytes, features=unseen.features
    )
    low, high = prediction.interval(confidence=0.9)
    factor = np.exp(np.mean(np.log(seen.measured_memory_bytes / seen.memory_bytes)))
    methods = {
        "calibrated": Predictions(step_s=prediction.median_bytes, low_s=low, high_s=high),
        "uncalibrated": Predictions(
            step_s=unseen.memory_bytes,
            low_s=peaks.low_bytes[tested],
            high_s=peaks.high_bytes[tested],
        ),
        "mean_factor": Predictions(step_s=factor * unseen.memory_bytes),
    }
    return {name: score(each, unseen.measured_memory_bytes) for name, each in methods.items()}


def score_memory(peaks: Peaks, *, seeds: int) -> dict[str, Any]:
    """Return mean scores over the seeds on runs that a calibration did not see, by number of runs
    it saw.
    """
    by_count = {}
    for count in RUNS:
        if len(peaks.runs) - count >= LEAST_TESTED:
            trials = [
                compare(peaks, order[:count], order[count:])
                for order in random_orders(peaks.runs, seeds)
            ]
            by_count[str(count)] = mean_scores(trials)
    return by_count


def memory_text(report: dict[str, dict[str, Any]]) -> str:
    lines = [
        "Peak memory: error | coverage | ln(high/low) of calibrated predictions, without a "
        "calibration, error with one factor"
    ]
    for name, counts in report.items():
        lines += ["", name]
        for count, scores in counts.items():
            ours, none = (_line(scores[method]) for method in ("calibrated", "uncalibrated"))
            lines.append(
                f"  runs {count:>3} {ours}   none {none}   {scores['mean_factor']['error']:6.1%}"
            )
    return "\n".join(lines)


def _line(scores: dict[str, float]) -> str:
    return f"{scores['error']:6.1%} | {scores['coverage']:4.0%} | {scores['width']:4.2f}"
