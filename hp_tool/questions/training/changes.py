"""Single changes of a configuration whose step was measured by part, and the seconds that each
change would save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd
from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.switches import OVERLAPS
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import HpToolError
from hp_tool.questions import schema
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.fixes import legal_neighbours
from hp_tool.wording.words import change_in_words

MIN_SAVED_FRACTION = 0.01
"""Minimum saving, as a fraction of the measured step."""
MAX_RATIO = 4.0
"""Maximum ratio of a measured part to its prediction. A larger ratio has another cause, which the
change may not fix.
"""
OWN_PART_FRACTION = 0.5
"""Minimum fraction of a change's saving that must come from the part for which the change is
reported.
"""
MIN_PART_FRACTION = 0.01
"""Minimum fraction of the predicted step for a part to be compared. Smaller parts are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change and its saving."""

    change: str
    """The change, in words."""
    part: str
    """Part of the step, from STEP_KEYS, with the largest saving."""
    parallel: ParallelConfig
    """The complete changed configuration; valid input."""
    set: ChosenValues = field(default_factory=dict)
    """Query values other than `parallel` that the change requires, by path."""
    seconds: float
    """Seconds saved per step."""
    seconds_interval: tuple[float, float]
    """90% interval, from the standard deviation of the ratio of two predictions."""


def saving_changes(
    query: Query, *, estimate: Estimate, measured_s: Mapping[str, float]
) -> tuple[Change, ...]:
    """Return the changes that save at least MIN_SAVED_FRACTION of the step, largest saving first.

    They are at most one axis change per part, plus overlaps. If a part took k times its prediction,
    it is assumed to take k times its prediction after the change too: saving = sum over parts of k
    (predicted - predicted after the change). The keys of `measured_s` are STEP_KEYS.
    """
    if estimate.time is None or estimate.parallel is None:
        return ()
    changes = [
        *_overlap_changes(query, estimate, measured_s),
        *_axis_changes(query, estimate, measured_s),
    ]
    min_saving_s = MIN_SAVED_FRACTION * sum(measured_s.values())
    return tuple(
        sorted(
            (each for each in changes if each.seconds >= min_saving_s),
            key=lambda change: -change.seconds,
        )
    )


def _part_ratios(
    predicted_s: Mapping[str, float], measured_s: Mapping[str, float]
) -> dict[str, float]:
    """Return k for each part. For overheads, k is at most 1, because their cause is unknown."""
    min_s = MIN_PART_FRACTION * sum(predicted_s.values())
    ratios = {}
    for part, seconds in predicted_s.items():
        max_ratio = 1.0 if part == "overhead" else MAX_RATIO
        ratios[part] = (
            min(measured_s.get(part, 0.0) / seconds, max_ratio) if seconds > min_s else 1.0
        )
    return ratios


def _axis_changes(
    query: Query, estimate: Estimate, measured_s: Mapping[str, float]
) -> Iterator[Change]:
    """Return, for each part, the acceptable neighbour with one changed axis that saves most in this
    part.
    """
    assert estimate.time is not None and estimate.parallel is not None
    problem = resolve_configuration(query).problem
    neighbours = legal_neighbours(query, problem, estimate, changes=1)
    if neighbours is None:
        return
    predicted_s, rows = estimate.time.parts_s, np.flatnonzero(neighbours.acceptable)
    ratios = _part_ratios(predicted_s, measured_s)
    wins = {
        part: ratios[part] * (seconds - neighbours.costs.parts[part][rows])
        for part, seconds in predicted_s.items()
    }
    won = np.sum(list(wins.values()), axis=0)
    best = {}
    for part, saved_s in wins.items():
        # Rows whose savings come mostly from this part.
        is_main_part = (won > 0.0) & (saved_s >= OWN_PART_FRACTION * won)
        if is_main_part.any():
            best[part] = int(np.argmax(np.where(is_main_part, np.minimum(saved_s, won), 0.0)))
    for part, place in best.items():
        row = int(rows[place])
        after = estimate_row(
            row, case=problem, costs=neighbours.costs, candidates=neighbours.candidates
        )
        assert after.parallel is not None
        gpus = (problem.cluster.num_gpus, problem.cluster.num_gpus)
        seconds = float(won[place])
        yield Change(
            change=change_in_words(neighbours.base, after.parallel, gpus=gpus),
            part=part,
            parallel=problem.with_common_settings(after.parallel),
            seconds=seconds,
            seconds_interval=_saving_interval(
                seconds, sum(measured_s.values()), log_sd=float(ratio_log_sd(problem.profile))
            ),
        )


def _overlap_changes(
    query: Query, estimate: Estimate, measured_s: Mapping[str, float]
) -> Iterator[Change]:
    """Yield overlaps that the measured run probably did not use, because the measured part is
    closer to the prediction without the overlap than to that with it.
    """
    assert estimate.parallel is not None and query.training is not None
    known = query.training.overlap or OverlapSpec()
    for name, kind in OVERLAPS.items():
        with_it, without = (
            _part_s(query, replace(known, **{name: value}), kind.part) for value in (True, False)
        )
        measured = measured_s.get(kind.part, 0.0)
        if (
            with_it is None
            or without is None
            or not without > max(with_it, 1e-12)
            or measured <= 0.0
        ):
            continue
        if abs(math.log(measured / without)) > abs(
            math.log(measured / max(with_it, 1e-3 * without))
        ):
            continue
        seconds = measured * (1.0 - with_it / without)
        problem = resolve_configuration(query).problem
        yield Change(
            change=f"overlap.{name} on",
            part=kind.part,
            parallel=estimate.parallel,
            set={"training.overlap": schema.to_dict(replace(known, **{name: True}))},
            seconds=seconds,
            seconds_interval=_saving_interval(
                seconds, sum(measured_s.values()), log_sd=float(ratio_log_sd(problem.profile))
            ),
        )


def _part_s(query: Query, overlap: OverlapSpec, part: str) -> float | None:
    """Return the predicted seconds of a part with an overlap; None if the overlap is not
    supported.
    """
    assert query.training is not None
    try:
        changed = resolve_configuration(
            replace(query, training=replace(query.training, overlap=overlap))
        )
        estimate = changed.estimate(with_fixes=False)
    except HpToolError:
        return None
    return None if estimate.time is None else estimate.time.parts_s[part]


def _saving_interval(seconds: float, step_s: float, *, log_sd: float) -> tuple[float, float]:
    """Return the 90% interval of the saving in seconds.

    `log_sd` is the standard deviation of the logarithm of the ratio of two predictions.
    """
    after = max(step_s - seconds, 0.0)
    wide = math.exp(NORMAL_QUANTILE * log_sd)
    return step_s - after * wide, step_s - after / wide
