"""Changes that make an infeasible configuration feasible, and their cost."""

from dataclasses import dataclass, replace

from hp_tool.domain.fit import Fit
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Fix
from hp_tool.domain.serving import InferenceEstimate, ServingFix
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.wording.fit import traded_words
from service.dashboard.metrics import Metric, fix_metrics
from service.dashboard.page import compare_href, configuration_href


@dataclass(frozen=True, slots=True, kw_only=True)
class FixRow:
    """A change that makes an infeasible configuration feasible, and its cost."""

    change: str
    href: str
    compare_href: str
    fit: Fit | None
    """Whether the changed configuration fits, as a word; None for serving."""
    out_of_memory_probability: float | None
    figures: tuple[Metric, ...]
    """Figures of the changed configuration. All fixes have the same ones."""
    remaining: tuple[str, ...]
    """Targets that the changed configuration still misses."""
    price: str = ""
    """Latencies that become much longer."""


def fix_row(
    fix: Fix | ServingFix,
    *,
    of: Configuration,
    before: Estimate | InferenceEstimate,
    calibrated: Estimate | None,
    calibrations: Calibrations | None,
) -> FixRow:
    """Return the row for a fix.

    `calibrated` is the requested configuration's calibrated estimate. If it is set, the fix's
    metrics are calibrated too.
    """
    fixed = Configuration.from_row(fix, query=of.query)
    if isinstance(fix, Fix) and calibrated is not None:
        fix = _calibrated_fix(fix, fixed.query, calibrated, calibrations)
    return FixRow(
        change=fix.change,
        href=configuration_href(fixed),
        compare_href=compare_href(of, fixed),
        fit=fix.fit,
        out_of_memory_probability=fix.out_of_memory_probability,
        figures=fix_metrics(fix),
        remaining=tuple(reason.message for reason in fix.remaining),
        price=traded_words(fix, before),
    )


def _calibrated_fix(
    fix: Fix, query: Query, without: Estimate, calibrations: Calibrations | None
) -> Fix:
    known = resolve_configuration(query).calibrated_estimate(calibrations)
    if known is None or known.time is None or known.memory is None:
        return fix
    change = known.time.step_s / without.time.step_s - 1.0 if without.time else None
    return replace(
        fix,
        memory_total_bytes=known.memory.total_bytes,
        out_of_memory_probability=known.out_of_memory_probability,
        fit=known.fit,
        step_s=known.time.step_s,
        step_change_fraction=change,
    )
