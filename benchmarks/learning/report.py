"""Format the scores as tables, and count the sets that meet each target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scipy.stats import binom

HARM, BAD_COST, CONTRARY_COST = 0.01, 0.03, 0.01
"""Maximum increase of the mean error: by calibrating, by one bad row of five, and by contradictory
runs compared with a single factor.
"""
COVERED = (0.83, 0.97)
"""Accepted range of the coverage of 90% intervals."""
BETTER_FROM = 3
"""Minimum number of runs from which a calibration should be better than a single factor."""
NARROWER, NARROW_AT = 0.8, "5"
"""Maximum ratio of ln(high / low) to the baseline's, and the number of runs at which it is checked.
"""


def as_text(report: dict[str, Any], baseline: dict[str, Any] | None = None) -> str:
    lines = [
        "error | coverage | ln(high/low) of calibrated predictions, then errors without a "
        "calibration, with one factor"
    ]
    lines[0] += (
        " (mean, median), with the nearest run's factor; rank correlation after and before, regret "
        "after and before"
    )
    for name, runs in report.items():
        earlier = (baseline or {}).get(name, {})
        lines += ["", f"{name}: {runs['rows']} runs"]
        titles = (
            ("learning", "runs"),
            ("disturbed", "5 runs, one"),
            ("contrary", "6 runs,"),
            ("carried", ""),
        )
        for kind, title in titles:
            for key, scores in runs[kind].items():
                before = earlier.get(kind, {}).get(key)
                lines.append(f"  {f'{title} {key}'.strip():52} {_line(scores)}{_change(before)}")
    lines += ["", "Promises", *(f"  {text}" for text in promises(report, baseline or {}))]
    return "\n".join(lines)


def _line(scores: dict[str, Any]) -> str:
    ours, none = scores["calibrated"], scores["uncalibrated"]
    others = " ".join(
        f"{scores[name]['error']:6.1%}" for name in ("mean_factor", "median_factor", "nearest")
    )
    text = f"{ours['error']:6.1%} | {ours['coverage']:4.0%} | {ours['width']:4.2f}"
    text += f"   none {none['error']:6.1%} {none['coverage']:4.0%} {none['width']:4.2f}   {others}"
    if "cost" in scores:
        text += f"   cost {scores['cost']:+6.1%}"
    if "ranking" in scores:
        after, before = (scores["ranking"][name] for name in ("calibrated", "uncalibrated"))
        text += (
            f"   rank {after['correlation']:.2f} {before['correlation']:.2f}, "
            f"{after['regret']:.1%} {before['regret']:.1%}"
        )
    return text


def _change(before: dict[str, Any] | None) -> str:
    if before is None:
        return ""
    ours = before["calibrated"]
    return f"   was {ours['error']:6.1%} | {ours['coverage']:4.0%} | {ours['width']:4.2f}"


def promises(report: dict[str, Any], baseline: dict[str, Any]) -> Iterator[str]:
    """Yield each target with the number of sets and directions that meet it, and those that miss
    it.
    """
    every = {
        f"{name}, {kind} {key}": scores
        for name, kind, key, scores in _all(report)
        if kind in ("learning", "carried")
    }
    yield _held(
        f"never worse than uncalibrated by more than {HARM:.0%}",
        {key: s["calibrated"]["error"] - s["uncalibrated"]["error"] for key, s in every.items()},
        lambda value: value <= HARM,
    )
    learnt = {(name, int(key)): s for name, kind, key, s in _all(report) if kind == "learning"}
    yield _held(
        f"better than one factor from {BETTER_FROM} runs on",
        {
            f"{name} {count}": s["calibrated"]["error"]
            - min(s[each]["error"] for each in ("mean_factor", "median_factor"))
            for (name, count), s in learnt.items()
            if count >= BETTER_FROM
        },
        lambda value: value <= 0,
    )
    yield _held(
        "5 % by 10 runs on MPT and dense recipes",
        {
            name: s["calibrated"]["error"]
            for (name, k), s in learnt.items()
            if k == 10 and name.startswith(("MPT", "Recipes"))
        },
        lambda value: value <= 0.05,
    )
    yield _held(
        f"one bad row of five costs at most {BAD_COST:.0%}",
        {f"{name} {key}": s["cost"] for name, kind, key, s in _all(report) if kind == "disturbed"},
        lambda value: value <= BAD_COST,
    )
    yield _held(
        f"runs that contradict each other cost at most {CONTRARY_COST:.0%} more than with one "
        "factor",
        {
            name: s["calibrated"]["error"]
            - min(s[each]["error"] for each in ("mean_factor", "median_factor"))
            for name, kind, _, s in _all(report)
            if kind == "contrary"
        },
        lambda value: value <= CONTRARY_COST,
    )
    yield _held(
        f"coverage {COVERED[0]:.0%} to {COVERED[1]:.0%}",
        {key: s["calibrated"]["coverage"] for key, s in every.items()},
        lambda value: COVERED[0] <= value <= COVERED[1],
    )
    yield _held(
        f"coverage {COVERED[0]:.0%} to {COVERED[1]:.0%}, or as far off as chance has it on so few "
        "rows (by how much not)",
        {key: _beyond_chance(s["calibrated"]) for key, s in every.items()},
        lambda value: value == 0.0,
    )
    yield _held(
        f"coverage at least {COVERED[0]:.0%}",
        {key: s["calibrated"]["coverage"] for key, s in every.items()},
        lambda value: value >= COVERED[0],
    )
    widths = {}
    for (name, count), s in learnt.items():
        before = baseline.get(name, {}).get("learning", {}).get(str(count))
        if before is not None and str(count) == NARROW_AT:
            honest = "" if before["calibrated"]["coverage"] >= COVERED[0] else " (not honest then)"
            widths[f"{name}{honest}"] = s["calibrated"]["width"] / before["calibrated"]["width"]
    yield _held(
        f"width at {NARROW_AT} runs at most {NARROWER} of the baseline's",
        widths,
        lambda value: value <= NARROWER,
    )


def _beyond_chance(scores: dict[str, Any]) -> float:
    """Return how far a coverage lies outside COVERED and outside the central 95% of the binomial
    distribution for its number of rows.
    """
    least, most = (
        float(binom.ppf(q, scores["rows"], 0.9)) / scores["rows"] for q in (0.025, 0.975)
    )
    covered: float = scores["coverage"]
    return min(covered - min(least, COVERED[0]), 0.0) + max(covered - max(most, COVERED[1]), 0.0)


def _held(text: str, values: dict[str, float], fine: Any) -> str:
    missed = sorted(
        ((value, key) for key, value in values.items() if not fine(value)), reverse=True
    )
    listed = "".join(f"\n      {value:+.3f}  {key}" for value, key in missed)
    return f"{text}: {len(values) - len(missed)} of {len(values)}{listed}"


def _all(report: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for name, runs in report.items():
        for kind in ("learning", "disturbed", "contrary", "carried"):
            for key, scores in runs[kind].items():
                yield name, kind, key, scores
