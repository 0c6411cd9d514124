"""Measured and predicted times of a step's parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hp_tool.domain.result import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One part of a step; the parts of a result sum to the step."""

    name: str
    measured_s: float
    """Measured seconds on the critical rank."""
    predicted_s: float | None = None
    """Predicted seconds; None without a query."""
    interval: tuple[float, float] | None = None
    """90% interval of predicted_s; None if the predicted step has none."""

    @property
    def excess_s(self) -> float:
        """Measured minus predicted seconds; 0 without a prediction."""
        return 0.0 if self.predicted_s is None else self.measured_s - self.predicted_s


def step_parts(
    measured_s: Mapping[str, float],
    estimate: Estimate | None,
    *,
    covers: Mapping[str, Iterable[str]],
) -> tuple[StepPart, ...]:
    """Return the parts of a step, measured and predicted.

    The relative errors of the parts are assumed to be independent and equally large. With s, the
    standard deviation of ln(measured / predicted step), and w_i = predicted_i / step, each part has
    the standard deviation s / sqrt(sum of w_i^2). The sum of the parts then has the standard
    deviation s.

    Args:
        measured_s: Seconds by name.
        estimate: The prediction; None without a query.
        covers: For each name, the parts of `estimate.time.parts_s` that it comprises.
    """
    if estimate is None or estimate.time is None:
        return tuple(StepPart(name=name, measured_s=value) for name, value in measured_s.items())
    parts_s, step_s = estimate.time.parts_s, estimate.time.step_s
    predicted = {name: sum(parts_s.get(part, 0.0) for part in covers[name]) for name in measured_s}
    width = None
    if estimate.intervals is not None:
        low, high = estimate.intervals.step_s
        shares = sum((seconds / step_s) ** 2 for seconds in predicted.values())
        width = math.exp(0.5 * math.log(high / low) / math.sqrt(shares))
    return tuple(
        StepPart(
            name=name,
            measured_s=measured_s[name],
            predicted_s=seconds,
            interval=None if width is None else (seconds / width, seconds * width),
        )
        for name, seconds in predicted.items()
    )
