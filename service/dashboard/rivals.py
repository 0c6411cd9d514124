"""Untested configurations of a finished search that are tied with its answer."""

import math
from dataclasses import dataclass

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.records import SearchRecord
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.loop.calibration.posterior import ratio_interval
from service.api.search_results import complete_rows
from service.dashboard import trials
from service.dashboard.page import configuration_href, stored_configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A configuration that did not run and may be as good as the answer."""

    arithmetic: str
    details: str
    step_s: float
    """Calibrated seconds per step or request."""
    href: str | None
    """URL of its page; None if the stored query is not readable."""


def list_rivals(record: SearchRecord) -> tuple[Rival, ...]:
    """Return the untested rows of the result that may be as fast as the first row.

    The 90% interval of their time ratio contains 1.
    """
    rows = complete_rows(record)
    if (
        not rows
        or rows[0].rank != 1
        or (first := _seconds_and_deviation(rows[0].preferred_estimate)) is None
    ):
        return ()
    alike = []
    for row in rows[1:]:
        if (
            row.measurement is not None
            or (known := _seconds_and_deviation(row.preferred_estimate)) is None
        ):
            continue
        _, low, high = ratio_interval(known, first, quantile=NORMAL_QUANTILE)
        if low <= 1.0 <= high:
            configuration = stored_configuration(record.query, row)
            arithmetic, details = trials.configuration_words(row.parallel, record.query)
            href = (
                None
                if configuration is None
                else configuration_href(configuration, search_id=record.id)
            )
            alike.append(Rival(arithmetic=arithmetic, details=details, step_s=known[0], href=href))
    return tuple(alike)


def _seconds_and_deviation(estimate: Estimate | InferenceEstimate) -> tuple[float, float] | None:
    """Return the seconds per step or request, and the standard deviation of their logarithm.

    Return None if either is unknown.
    """
    if estimate.intervals is None:
        return None
    if isinstance(estimate, Estimate):
        seconds, interval = estimate.time and estimate.time.step_s, estimate.intervals.step_s
    else:  # Output tokens take most of a request's time.
        seconds, interval = estimate.request_latency_s, estimate.intervals.tpot_s
    return (
        (seconds, math.log(interval[1] / interval[0]) / (2.0 * NORMAL_QUANTILE))
        if seconds and interval[0] > 0.0
        else None
    )
