"""The one shape of evidence: a published figure beside its prediction, and the interval that was
stated with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One published figure beside its prediction, in the same unit."""

    source: str
    model: str
    what: str
    published: float
    predicted: float
    """Not a number where the query was refused."""
    low: float | None = None
    """Of the 90 % interval; None where none is stated."""
    high: float | None = None
    gpu: str = ""
    part: str = ""
    """The rows that a report shows together: a GPU, or a release."""
    setting: str = ""
    """Rows of one setting (releases or submitters of one configuration) are one vote; empty: this
    row is a vote of its own.
    """
    differs: tuple[str, ...] | None = None
    """Dimensions in which the nearest measured runs differ (`domain.familiarity`), the one that
    widens the interval most first; None where that was not asked.
    """
    kind: str = ""
    """Kind of model or task, of rows with `differs`: dense, mixture, adapters."""
    base_log_sd: float | None = None
    """The standard deviation of the interval without what these differences add."""
    refused: str | None = None
    """The code under which this run, which was real, is called infeasible or is refused."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1.0

    @property
    def log_ratio(self) -> float:
        """log(published / predicted)."""
        return math.log(self.published / self.predicted)

    def within(self, log_width: float) -> Comparison:
        """Return the row in an interval that reaches this far up and down, in logarithms."""
        spread = math.exp(log_width)
        return replace(self, low=self.predicted / spread, high=self.predicted * spread)
