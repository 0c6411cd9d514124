"""Sentences for a verdict, and likely causes derived from rank and part times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hp_tool.domain.units import format_duration, format_factor
from hp_tool.domain.watch import Cause, CauseKind, Expected, Slowdown, Verdict
from hp_tool.watch.slowdowns.causes import COMMUNICATION, RankTimes, lagging, part_growths

DOUBTED_SPEEDUP = 1.5
"""If the job is faster than expected by this factor, the query is probably wrong."""
MAX_NAMED_RANKS = 8
"""Maximum number of ranks that a sentence names."""


def cause_sentences(
    ranks: Sequence[RankTimes], *, hosts: Mapping[int, str], factor: float, step_s: float
) -> tuple[Cause, ...]:
    """Return likely causes of a slowdown, most likely first.

    Args:
        ranks: Median part times by rank, before and after the change.
        hosts: Host name by rank.
        factor: New step time divided by the old one.
        step_s: New step time in seconds.
    """
    slowed = math.log(factor)
    has_parts = any(len(rank.after) > 1 or "step" not in rank.after for rank in ranks)
    slow, typical = lagging(ranks)
    if not ranks or typical is None or (not has_parts and not slow):
        text = (
            "Cause unknown: ranks wait for each other, so one slow rank slows them all. Report "
            "each rank's compute time (parts_s) to find it."
        )
        return (Cause(kind="unknown", text=text),)
    causes = []
    if slow and (typical < slowed / 2.0 or slow[0][1] - typical >= slowed / 2.0):
        names = tuple(rank for rank, _ in slow)
        slow_hosts = tuple(dict.fromkeys(hosts[rank] for rank in names if rank in hosts))
        causes.append(
            Cause(
                kind="some_ranks",
                ranks=names,
                hosts=slow_hosts,
                text=f"{_rank_list(names, len(ranks))}{_host_suffix(slow_hosts)}: compute time "
                f"{math.expm1(slow[0][1]):+.0%} (other ranks: {math.expm1(typical):+.0%})",
            )
        )
    elif typical >= slowed / 2.0:
        causes.append(
            Cause(
                kind="all_ranks",
                text=f"all ranks: compute time {math.expm1(typical):+.0%}. Check clocks (power, "
                "heat), data loading and the program.",
            )
        )
    longer_s = step_s * (1.0 - 1.0 / factor)
    for name, grown_s in part_growths(ranks).items():
        share = min(grown_s / longer_s, 1.0)
        if name == "step" or share < 0.2:
            continue
        waits = name == COMMUNICATION
        if waits and causes and causes[0].kind == "some_ranks":
            continue  # The others wait for these ranks.
        kind: CauseKind = "communication" if waits else "part"
        tail = " (links, or a rank that does not report its compute time)" if waits else ""
        causes.append(
            Cause(
                kind=kind,
                part=name,
                share=share,
                text=f"{name}: {share:.0%} of the added time{tail}",
            )
        )
    return tuple(causes)


def _rank_list(names: tuple[int, ...], all_ranks: int) -> str:
    shown = ", ".join(map(str, names[:MAX_NAMED_RANKS])) + (
        f" and {len(names) - MAX_NAMED_RANKS} more" if len(names) > MAX_NAMED_RANKS else ""
    )
    return f"rank {shown} of {all_ranks}" if len(names) == 1 else f"ranks {shown} of {all_ranks}"


def _host_suffix(hosts: tuple[str, ...]) -> str:
    return f" on {', '.join(hosts[:MAX_NAMED_RANKS])}" if hosts else ""


def verdict_sentences(verdict: Verdict) -> tuple[str, ...]:
    """Return sentences that explain why a job is slow. Empty if it is not."""
    now, was, slowdown, lag, expected = (
        verdict.now,
        verdict.was,
        verdict.slowdown,
        verdict.lag,
        verdict.expected,
    )
    if not verdict.slow:
        return ()
    lines = []
    if slowdown is not None:
        seconds = (
            ""
            if now is None or was is None
            else f" ({format_duration(was.step_s)} -> {format_duration(now.step_s)} a step)"
        )
        lines.append(
            f"slower than it was: {_percent(slowdown.factor, slowdown.interval)} since step "
            f"{slowdown.since_step}, "
            f"{_describe_shape(slowdown)}{seconds}"
        )
        lines += [f"  {cause.text}" for cause in verdict.causes]
    if lag is not None and expected is not None and now is not None:
        lines.append(
            f"slower than it should be: {_percent(lag.factor, lag.interval)} "
            f"({format_duration(now.step_s)} a step, {format_duration(expected.step_s)} expected"
            f"{_layout_suffix(expected)})"
        )
    if (loss := verdict.loss_per_day) is not None:
        money = "" if loss.cost is None else f", ${loss.cost:,.0f}"
        devices = "" if loss.gpu_hours is None else f", {loss.gpu_hours:,.0f} GPU-hours{money}"
        lines.append(f"costs {loss.hours:.1f} h per day{devices}")
    return tuple(lines)


def _describe_shape(slowdown: Slowdown) -> str:
    if slowdown.shape != "recurring":
        return slowdown.shape
    return "in bursts" if slowdown.period is None else f"every {_ordinal(slowdown.period)} step"


def _ordinal(number: int) -> str:
    ending = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"


def faster_words(verdict: Verdict) -> str:
    """Return a sentence if the job is certainly faster than expected; otherwise an empty string.

    Example: `2.0x faster than expected: 39.03 s per step, 78.94 s expected (73.80 s to 543.2 s)`.
    """
    now, expected = verdict.now, verdict.expected
    if now is None or expected is None or now.interval[1] >= expected.interval[0]:
        return ""
    low, high = map(format_duration, expected.interval)
    query = ". Is the query for another job?" if doubts_query(verdict) else ""
    between = (
        f"{format_duration(now.step_s)} a step, {format_duration(expected.step_s)} expected "
        f"({low} to "
        f"{high}){_layout_suffix(expected)}"
    )
    return f"{format_factor(expected.step_s / now.step_s)} as fast as expected: {between}{query}"


def doubts_query(verdict: Verdict) -> bool:
    """Return True if the job is so fast that the query probably describes a different job."""
    now, expected = verdict.now, verdict.expected
    if now is None or expected is None:
        return False
    return now.interval[1] < expected.interval[0] and expected.step_s > DOUBTED_SPEEDUP * now.step_s


def _layout_suffix(expected: Expected) -> str:
    return f" of {expected.layout}" if expected.layout else ""


def _percent(factor: float, interval: tuple[float, float]) -> str:
    return f"{factor - 1.0:+.1%} ({interval[0] - 1.0:+.1%} to {interval[1] - 1.0:+.1%})"
