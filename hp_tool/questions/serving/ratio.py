"""Ratio of two configurations' times per output token and GPU, with its interval."""

import math

from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.wording.figures import OUTPUT


def output_ratio(
    first: Estimate | InferenceEstimate, second: Estimate | InferenceEstimate
) -> tuple[float, tuple[float, float]] | None:
    """Return the second configuration's time per output token and GPU divided by the first one's,
    with its 90% interval; None if a rate or an interval is missing.
    """
    one, other = OUTPUT.value(first), OUTPUT.value(second)
    ends, other_ends = OUTPUT.stored_interval(first), OUTPUT.stored_interval(second)
    if not one or not other or not (ends and ends[0]) or not (other_ends and other_ends[0]):
        return None
    log_widths = (math.log(high / low) for low, high in (ends, other_ends))
    spread = math.exp(math.hypot(*log_widths) / 2.0)
    return one / other, (one / other / spread, one / other * spread)
