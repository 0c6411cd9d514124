"""What answers of trainings and of deployments share: the baseline they are compared with, and what each axis decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hp_tool.calibration.evidence import FloatArray
from hp_tool.domain.answer import BaselineSource, Gain
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.serving import RunConfig
from hp_tool.errors import InputError
from hp_tool.tuning.known import gain_of

FIELD = "search.baseline"
Config = TypeVar("Config", bound=RunConfig)
Predicted = TypeVar("Predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBaseline(Generic[Config, Predicted]):
    """The configuration that an answer is compared with, by the estimate that ranks all others."""

    parallel: Config
    source: BaselineSource
    estimate: Predicted
    known: tuple[float, float]
    """(seconds, log_sd) of a step or a request."""

    def gain(self, parallel: RunConfig, known: tuple[float, float]) -> Gain:
        """How many times as fast the answer's configuration is."""
        return gain_of(known, baseline=self.known, against=self.source, same=self.parallel == parallel)


def described_baseline(
    query: Query, *, resolve: Callable[[ParallelQuery], Config], reasons: Callable[[Config], str]
) -> Config | None:
    """Return the configuration that `search.baseline` describes; None where the query has none.

    `reasons`: why a configuration is illegal, in words; none if it is legal. Raises InputError `illegal_baseline`.
    """
    if query.search.baseline is None:
        return None
    try:
        config = resolve(query.search.baseline)
    except InputError as error:
        raise InputError(error.message, field=(error.field or "").replace("parallel", FIELD, 1) or FIELD) from None
    if why := reasons(config):
        raise InputError(f"the baseline is not legal: {why}", field=FIELD, code="illegal_baseline")
    return config


def compared_with(described: RunConfig | None, runs: Sequence[RunRecord]) -> tuple[RunConfig | None, BaselineSource]:
    """Return what an answer is compared with: the described one, which need not be a candidate, else the first that worked."""
    if described is not None:
        return described, "search.baseline"
    return next((run.parallel for run in runs if run.status == "ok"), None), "first run"


def saved_parts(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part that the second of two configurations saves."""
    return {name: before.get(name, 0.0) - after.get(name, 0.0) for name in (*before, *after)}


def effect_of_axes(
    axes: Mapping[str, Sequence[int | bool | str]], rows: Sequence[int], step_s: FloatArray
) -> dict[str, dict[str, float]]:
    """Shortest step time among `rows` by the value of each axis: what holding on to that value costs."""
    effects: dict[str, dict[str, float]] = {}
    for name, values in axes.items():
        best: dict[str, float] = {}
        for row in rows:
            best[str(values[row])] = min(best.get(str(values[row]), math.inf), float(step_s[row]))
        if len(best) > 1:
            effects[name] = best
    return effects
