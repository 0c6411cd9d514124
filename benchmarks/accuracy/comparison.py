"""Common format of all evidence: a published figure, its prediction, and the predicted interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published figure and its prediction, in the same unit."""

    source: str
    model: str
    what: str
    published: float
    predicted: float
    """Predicted value; NaN if the query was rejected."""
    low: float | None = None
    """Lower end of the 90% interval; None if the prediction has no interval."""
    high: float | None = None
    gpu: str = ""
    part: str = ""
    """Rows that a report groups together: a GPU, or a release."""
    setting: str = ""
    """Rows of one setting (releases or submitters of one configuration) count as one vote; empty:
    this row is a separate vote.
    """
    differs: tuple[str, ...] | None = None
    """Dimensions in which the nearest measured runs differ (`domain.familiarity`), in descending
    order of how much they widen the interval; None if not determined.
    """
    kind: str = ""
    """Kind of model or task of rows with `differs`: dense, mixture (MoE), adapters."""
    base_log_sd: float | None = None
    """Standard deviation of the interval without the contribution of these differences."""
    refused: str | None = None
    """Reason code if the prediction calls this real run infeasible or rejects its query; None
    otherwise.
    """

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1.0

    @property
    def log_ratio(self) -> float:
        """Return ln(published / predicted)."""
        return math.log(self.published / self.predicted)

    def within(self, log_width: float) -> Comparison:
        """Return the row with an interval of this half-width around the prediction, in natural
        logarithms.
        """
        spread = math.exp(log_width)
        return replace(self, low=self.predicted / spread, high=self.predicted * spread)
