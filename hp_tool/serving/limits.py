"""Latency targets: which predicted figure each bounds, which candidates meet them all, and the reasons for missing them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.domain.result import Reason
from hp_tool.serving.problem import CostedRows
from hp_tool.serving.tails import quantiles
from hp_tool.units import duration


def bounded_values(rows: CostedRows) -> Iterator[tuple[str, float, FloatArray]]:
    """Each target of the query: its name, its limit, and the predicted values that it bounds, a mean or a quantile."""
    targets = rows.problem.targets
    for name in targets.__slots__:
        limit = getattr(targets, name)
        if limit is None:
            continue
        latency, _, quantile = name.removesuffix("_s").partition("_p")
        if not quantile.isdigit():
            yield name, limit, getattr(rows.costs, name)
        else:
            share = quantiles(rows, int(quantile) / 100.0)
            yield name, limit, share.ttft_s if latency == "ttft" else share.tpot_s


def meets_targets(rows: CostedRows) -> BoolArray:
    """True where every latency target is met."""
    met = np.ones(len(rows.candidates), dtype=bool)
    for _, limit, values in bounded_values(rows):
        met &= values <= limit
    return met


def missed_targets(rows: CostedRows, row: int) -> tuple[Reason, ...]:
    """A reason for each target that the configuration misses, and by how much."""
    reasons = []
    for name, limit, values in bounded_values(rows):
        if (value := float(values[row])) > limit:
            message = f"{name} {duration(value)} is above targets.{name} {duration(limit)} by {value / limit - 1.0:.0%}"
            reasons.append(Reason(code="target_missed", message=message, needed=value, available=limit))
    return tuple(reasons)
