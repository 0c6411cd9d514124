"""Sentences about the expected cost of a search, for pages and the terminal."""

from collections.abc import Callable

from hp_tool.domain.plan import SearchPlan
from hp_tool.domain.units import SECONDS_PER_HOUR, capitalize_first, format_duration
from hp_tool.wording.fit import unrun_settings_words

Interval = tuple[float, float] | None


def expected_words(plan: SearchPlan) -> str:
    """Return `at most 8 runs (budget_runs), 12.0 min to 40.0 min without waiting for devices, 1.6
    to 5.3 GPU-hours, ...`.
    """
    parts = [
        f"at most {plan.runs} runs ({plan.stopped_by})",
        f"{range_words(plan.wall_s, plan.wall_s_interval, format_duration)} without waiting for "
        f"devices",
        range_words(plan.gpu_seconds, plan.gpu_seconds_interval, format_device_time),
    ]
    if plan.cost is not None:
        parts.append(range_words(plan.cost, plan.cost_interval, format_money))
    if plan.wall_s_interval is not None:
        parts.append("a range, because no start-up time was measured here yet")
    return ", ".join(parts)


def worst_case_words(plan: SearchPlan) -> str:
    """Return `11.2 GPU-hours, $40, if every run reaches its time limit`. Add a warning if the limit
    is shorter than the expected run.
    """
    cost = "" if plan.most_cost is None else f", {format_money(plan.most_cost)}"
    worst = (
        f"{format_device_time(plan.most_gpu_seconds)}{cost}, if every run reaches its time limit"
    )
    short = [run for run in (plan.first, plan.confirmation) if run is not None and run.cut_off]
    if short:
        worst += (
            f"; a run is expected to exceed search.run_timeout_s "
            f"({format_duration(short[0].time_limit_s)})"
        )
    return worst


def bill_sentences(plan: SearchPlan) -> tuple[str, ...]:
    """Return sentences about the expected cost, the worst case, and usual settings that the runs do
    not use.
    """
    expected = expected_words(plan)
    unrun = unrun_settings_words(plan.unrun)
    return (
        f"{capitalize_first(expected)}.",
        f"At worst {worst_case_words(plan)}.",
        *((unrun,) if unrun else ()),
    )


def format_device_time(gpu_seconds: float) -> str:
    """Return `900 GPU-seconds` below an hour, `1.6 GPU-hours` from an hour on."""
    if gpu_seconds < SECONDS_PER_HOUR:
        return f"{gpu_seconds:,.0f} GPU-seconds"
    return f"{gpu_seconds / SECONDS_PER_HOUR:,.1f} GPU-hours"


def format_money(dollars: float) -> str:
    """Return US dollars, with cents below ten dollars."""
    return f"${dollars:,.2f}" if dollars < 10.0 else f"${dollars:,.0f}"


def range_words(value: float, interval: Interval, words: Callable[[float], str]) -> str:
    """Return the interval as `12.0 min to 40.0 min` or, if it is None, `value` in words."""
    return words(value) if interval is None else f"{words(interval[0])} to {words(interval[1])}"
