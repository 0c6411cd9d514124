"""Parts shared by training and serving answers: the baseline comparison and axis effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.answer import BaselineSource, Foreseen, Gain, GainSource, Repeats
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.serving import RunConfig
from hp_tool.errors import InputError
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.calibration.posterior import ratio_interval
from hp_tool.loop.search.noise import MeasuredSteps

FIELD = "search.baseline"
Config = TypeVar("Config", bound=RunConfig)
Predicted = TypeVar("Predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBaseline(Generic[Config, Predicted]):
    """The configuration to which an answer is compared, with its estimate."""

    parallel: Config
    source: BaselineSource
    estimate: Predicted
    known: tuple[float, float]
    """(seconds, log_sd) of a step or a request."""


def gains_of(
    parallel: Config,
    known: tuple[float, float],
    *,
    baseline: KnownBaseline[Config, Predicted],
    measured: MeasuredSteps,
) -> tuple[Gain, ...]:
    """Return the speedups of the answer over the baseline, the first run and the slowest run.

    `known` is the answer's (seconds, log_sd), by which it was chosen. It is used if either of two
    configurations did not run.
    """

    def gain(other: RunConfig, against: GainSource) -> Gain:
        ran = {parallel, other} <= measured.known.keys()
        factor, low, high = 1.0, 1.0, 1.0
        if other != parallel and ran:
            factor, low, high = measured.ratio(other, parallel)
        elif other != parallel:
            factor, low, high = map(
                float, ratio_interval(baseline.known, known, quantile=NORMAL_QUANTILE)
            )
        noise = {
            "noise_from": "repeats" if measured.num_repeats else "assumed",
            "noise_fraction": measured.repeat_log_sd,
        }
        source: dict[str, Any] = {"source": "measured", **noise} if ran else {"source": "predicted"}
        return Gain(against=against, factor=factor, interval=(low, high), **source)

    gains = [gain(baseline.parallel, baseline.source)]
    if parallel in measured.known:  # Measurements of others are not compared with a prediction.
        first, slowest = (
            next(iter(measured.known)),
            max(measured.known, key=lambda each: measured.known[each][0]),
        )
        gains += [gain(first, "first run")] if baseline.source != "first run" else []
        gains += [gain(slowest, "slowest run")] if slowest != parallel else []
    return tuple(gains)


def described_baseline(
    query: Query, *, resolve: Callable[[ParallelQuery], Config], reasons: Callable[[Config], str]
) -> Config | None:
    """Return the configuration in `search.baseline`; None if the query has none.

    `reasons` returns why a configuration is illegal, as text; empty if it is legal.

    Raises:
        InputError: The configuration is illegal (`illegal_baseline`).
    """
    if query.search.baseline is None:
        return None
    try:
        config = resolve(query.search.baseline)
    except InputError as error:
        raise InputError(
            error.message, field=(error.field or "").replace("parallel", FIELD, 1) or FIELD
        ) from None
    if why := reasons(config):
        raise InputError(f"The baseline is illegal: {why}", field=FIELD, code="illegal_baseline")
    return config


def choose_baseline(
    described: RunConfig | None, runs: Sequence[RunRecord]
) -> tuple[RunConfig | None, BaselineSource]:
    """Return the baseline in the query, else the first successful run.

    It need not be a candidate.
    """
    if described is not None:
        return described, "search.baseline"
    return next((run.parallel for run in runs if run.status == "ok"), None), "first run"


def prediction_before_run(measured: Repeats, *, runs: Sequence[RunRecord]) -> Foreseen | None:
    """Return a configuration's prediction before its first run.

    Return None if only a reduced run succeeded.
    """
    before = next((run.predicted for run in runs if run.fidelity.is_whole), None)
    if measured.reduced or before is None or "calibrated_step_s_interval" not in before:
        return None
    step_s, (low_s, high_s) = before["calibrated_step_s"], before["calibrated_step_s_interval"]
    return Foreseen(
        step_s=step_s,
        step_s_interval=(low_s, high_s),
        known_from_runs=before.get("calibration_measurements", 0),
        off_fraction=measured.step_s / step_s - 1.0,
    )


def saved_parts(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds saved by the second of two configurations, by part."""
    return {name: before.get(name, 0.0) - after.get(name, 0.0) for name in (*before, *after)}


def effect_of_axes(
    axes: Mapping[str, Sequence[int | bool | str]], rows: Sequence[int], step_s: FloatArray
) -> dict[str, dict[str, float]]:
    """Return the shortest step time among `rows` for each value of each axis.

    It shows the cost of fixing an axis to a value.
    """
    effects: dict[str, dict[str, float]] = {}
    for name, values in axes.items():
        best: dict[str, float] = {}
        for row in rows:
            best[str(values[row])] = min(best.get(str(values[row]), math.inf), float(step_s[row]))
        if len(best) > 1:
            effects[name] = best
    return effects
