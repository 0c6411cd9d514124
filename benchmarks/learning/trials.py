"""Calibrate with a few random runs; score error, coverage and width on the other runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr

from benchmarks.learning.sets import RunSet
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.loop.calibration import Evidence, fit_calibration, prior_for
from hp_tool.loop.calibration.evidence import scale_features

RUNS = (1, 2, 3, 5, 10, 20)
BAD = {"x5": 5.0, "x0.2": 0.2, "x1.5": 1.5}
"""Factors by which one of BAD_AMONG step times is multiplied."""
BAD_AMONG = 5
CONTRARY, CONTRARY_AMONG = 1.5, 6
"""Factor and number of contradictory runs: every other step time is multiplied by the factor, the
rest are divided by it.
"""
RANKED_AFTER = (5, 10)
LEAST_TESTED = 5
"""Minimum number of runs that must be left for predictions."""
LEAST_RANKED = 3
"""Minimum number of layouts in a cell whose ranking is scored."""
CARRIED = (5, 20)
"""Numbers of runs that a calibration learns from before it predicts runs with another value of a
label.
"""
NAMES, NUMBERS = ("model", "precision", "task"), ("size", "length", "devices")
LEAST_CARRIED = 3
Rows = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predicted step times of n runs, optionally with the bounds of their 90% intervals."""

    step_s: NDArray[np.float64]
    low_s: NDArray[np.float64] | None = None
    high_s: NDArray[np.float64] | None = None


def predict_calibrated(evidence: Evidence, unseen: Evidence) -> Predictions:
    """Predict unseen runs by a calibration fitted to `evidence`."""
    fit = fit_calibration(evidence=evidence, prior=prior_for(kind="gpu")).step_time
    step = fit.predict(
        parts_s=unseen.parts_s, layer_passes=unseen.layer_passes, features=unseen.features
    )
    low, high = step.interval(confidence=0.9)
    return Predictions(step_s=step.median_s, low_s=low, high_s=high)


def predict_uncalibrated(runs: RunSet, rows: Rows) -> Predictions:
    """Predict runs without a calibration."""
    predicted, factor = (
        runs.predicted_s[rows],
        np.exp(NORMAL_QUANTILE * runs.uncalibrated_log_sd[rows]),
    )
    return Predictions(step_s=predicted, low_s=predicted / factor, high_s=predicted * factor)


def predict_simply(evidence: Evidence, unseen: Evidence) -> dict[str, Predictions]:
    """Predict unseen runs by simple rules: one factor (the mean or median of measured / predicted),
    or the factor of the most similar run.
    """
    predicted, wanted = (np.sum(list(each.parts_s.values()), axis=0) for each in (evidence, unseen))
    ratios = np.log(evidence.measured_step_s / predicted)
    names = sorted(unseen.features)
    nearest = np.argmin(
        cdist(scale_features(unseen.features, names), scale_features(evidence.features, names)),
        axis=1,
    )
    return {
        "mean_factor": Predictions(step_s=wanted * np.exp(ratios.mean())),
        "median_factor": Predictions(step_s=wanted * np.exp(np.median(ratios))),
        "nearest": Predictions(step_s=wanted * np.exp(ratios[nearest])),
    }


def score(predictions: Predictions, measured_s: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean error, and the coverage, mean ln(high / low) and interval score of the
    intervals. The interval score (Gneiting and Raftery 2007) is the width plus 2 / 0.1 times the
    distance of a measurement outside the interval.
    """
    scores = {"error": float(np.mean(np.abs(predictions.step_s / measured_s - 1.0)))}
    if predictions.low_s is not None and predictions.high_s is not None:
        inside = (predictions.low_s <= measured_s) & (measured_s <= predictions.high_s)
        missed = np.maximum(
            np.log(predictions.low_s / measured_s), np.log(measured_s / predictions.high_s)
        ).clip(0.0)
        scores |= {
            "coverage": float(inside.mean()),
            "width": float(np.mean(np.log(predictions.high_s / predictions.low_s))),
            "rows": float(len(measured_s)),
            "interval_score": float(
                np.mean(np.log(predictions.high_s / predictions.low_s) + 20.0 * missed)
            ),
        }
    return scores


def compare(
    runs: RunSet, taught: Rows, tested: Rows, *, evidence: Evidence | None = None
) -> dict[str, Any]:
    """Return scores by method on the tested rows. `evidence` replaces the measurements of the
    taught rows.
    """
    seen, unseen = (
        runs.evidence.take(taught) if evidence is None else evidence,
        runs.evidence.take(tested),
    )
    methods = {
        "calibrated": predict_calibrated(seen, unseen),
        "uncalibrated": predict_uncalibrated(runs, tested),
        **predict_simply(seen, unseen),
    }
    scores: dict[str, Any] = {
        name: score(each, unseen.measured_step_s) for name, each in methods.items()
    }
    scores["ranking"] = [_ranked(runs, tested, methods)]
    return scores


def _ranked(
    runs: RunSet, tested: Rows, methods: dict[str, Predictions]
) -> dict[str, dict[str, float]]:
    """Return the mean over cells of the rank correlation and of the throughput lost by choosing the
    layout predicted fastest.
    """
    by_method: dict[str, dict[str, list[float]]] = {}
    measured = runs.evidence.measured_step_s[tested]
    for cell in dict.fromkeys(runs.cell[tested]):
        rows = np.flatnonzero(runs.cell[tested] == cell)
        if len(rows) < LEAST_RANKED or len(set(measured[rows])) < LEAST_RANKED:
            continue
        for name in ("calibrated", "uncalibrated", "nearest"):
            predicted = methods[name].step_s[rows]
            each = by_method.setdefault(name, {"correlation": [], "regret": []})
            each["correlation"].append(
                float(spearmanr(predicted, measured[rows]).statistic) if np.ptp(predicted) else 0.0
            )
            each["regret"].append(
                float(1.0 - measured[rows].min() / measured[rows][np.argmin(predicted)])
            )
    return {
        name: {key: fmean(values) for key, values in each.items()}
        for name, each in by_method.items()
    }


def score_learning(runs: RunSet, *, seeds: int) -> dict[str, Any]:
    """Return mean scores on the other runs, and how often the calibration was worse than none, by
    number of random runs.
    """
    by_count = {}
    for count in RUNS:
        if len(runs) - count < LEAST_TESTED:
            continue
        trials = [
            compare(runs, order[:count], order[count:]) for order in random_orders(runs, seeds)
        ]
        by_count[str(count)] = mean_scores(trials, ranking=count in RANKED_AFTER)
    return by_count


def score_outliers(runs: RunSet, *, seeds: int) -> dict[str, Any]:
    """Return scores after one bad row of five, and the increase of the error over the same draw
    without it.
    """
    by_kind = {}
    clean = [
        compare(runs, order[:BAD_AMONG], order[BAD_AMONG:]) for order in random_orders(runs, seeds)
    ]
    for name, factor in BAD.items():
        trials = []
        for order in random_orders(runs, seeds):
            taught = runs.evidence.take(order[:BAD_AMONG])
            bad = replace(
                taught,
                measured_step_s=taught.measured_step_s
                * np.where(np.arange(BAD_AMONG) == 0, factor, 1.0),
            )
            trials.append(compare(runs, order[:BAD_AMONG], order[BAD_AMONG:], evidence=bad))
        by_kind[name] = mean_scores(trials)
        by_kind[name]["cost"] = by_kind[name]["calibrated"]["error"] - fmean(
            trial["calibrated"]["error"] for trial in clean
        )
    return by_kind


def score_contradictions(runs: RunSet, *, seeds: int) -> dict[str, Any]:
    """Return scores after runs that contradict each other."""
    factors = CONTRARY ** np.where(np.arange(CONTRARY_AMONG) % 2 == 0, 1.0, -1.0)
    trials = []
    for order in random_orders(runs, seeds):
        taught = runs.evidence.take(order[:CONTRARY_AMONG])
        bad = replace(taught, measured_step_s=taught.measured_step_s * factors)
        trials.append(compare(runs, order[:CONTRARY_AMONG], order[CONTRARY_AMONG:], evidence=bad))
    return {f"x{CONTRARY} and /{CONTRARY} in turn": mean_scores(trials)}


def score_transfers(runs: RunSet, *, seeds: int) -> dict[str, Any]:
    """Return scores of calibrations that learn from runs on one side of a label and predict the
    other side. If a side has more runs than the calibration learns from, they are drawn at random.
    """
    by_direction = {}
    for direction, source, target in _directions(runs):
        if len(source) < LEAST_CARRIED or len(target) < LEAST_TESTED:
            continue
        for most in CARRIED:
            if most > CARRIED[0] and len(source) <= CARRIED[0]:
                continue
            draws = seeds if len(source) > most else 1
            orders = [order[np.isin(order, source)][:most] for order in random_orders(runs, draws)]
            by_direction[f"{direction}, {min(most, len(source))} runs"] = mean_scores(
                [compare(runs, each, target) for each in orders]
            )
    return by_direction


def _directions(runs: RunSet) -> Iterator[tuple[str, Rows, Rows]]:
    """Yield (name, rows to learn from, rows to predict): from each value of a name to all others,
    and between the lower and upper half of a number in both directions.
    """
    for name in NAMES:
        values = runs.labels[name]
        for value in dict.fromkeys(values):
            yield f"{name} {value} to others", *_sides(values == value)
    for name in NUMBERS:
        numbers = runs.labels[name].astype(float)
        middle = float(np.median(np.unique(numbers)))
        low = numbers <= middle if np.any(numbers > middle) else numbers < middle
        for text, side in (("small to large", low), ("large to small", ~low)):
            yield f"{name} {text}", *_sides(side)


def _sides(side: NDArray[np.bool_]) -> tuple[Rows, Rows]:
    return np.flatnonzero(side), np.flatnonzero(~side)


def random_orders(runs: RunSet, seeds: int) -> list[Rows]:
    """Return a random order of the rows for each seed; its first k rows are a draw of k."""
    start = zlib.crc32(runs.name.encode())
    return [np.random.default_rng([start, seed]).permutation(len(runs)) for seed in range(seeds)]


def mean_scores(trials: Sequence[dict[str, Any]], *, ranking: bool = False) -> dict[str, Any]:
    """Return means over trials by method, and the fraction of trials in which the calibration was
    worse than none.
    """
    methods = [name for name in trials[0] if name != "ranking"]
    means: dict[str, Any] = {
        name: {key: fmean(trial[name][key] for trial in trials) for key in trials[0][name]}
        for name in methods
    }
    worse = [trial["calibrated"]["error"] > trial["uncalibrated"]["error"] for trial in trials]
    means |= {"trials": len(trials), "worse": fmean(worse)}
    ranked = [each for trial in trials for each in trial["ranking"] if each] if ranking else []
    if ranked:
        means["ranking"] = {
            name: {
                key: fmean(each[name][key] for each in ranked) for key in ("correlation", "regret")
            }
            for name in ranked[0]
        }
    return means


def score_set(runs: RunSet, *, seeds: int) -> dict[str, Any]:
    """Return all scores of one set."""
    return {
        "rows": len(runs),
        "learning": score_learning(runs, seeds=seeds),
        "disturbed": score_outliers(runs, seeds=seeds),
        "contrary": score_contradictions(runs, seeds=seeds),
        "carried": score_transfers(runs, seeds=seeds),
    }
