"""What moved: a report's predictions and errors beside saved ones. A baseline holds predictions, never measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.sections import Section

SAVED = Path(__file__).with_name("baseline.json")
MOVED = 1e-3
"""Relative change of a prediction that counts as one."""
SHOWN = 8
"""Rows named in a section; the rest is counted."""


def summarise(sections: Sequence[Section], *, refused: int | None = None) -> dict[str, Any]:
    """{sections: {title: {mean_error, worst_error, predicted: {row: figure}}}, refused_runs}."""
    return {"sections": {section.title: _entry(section) for section in sections}, "refused_runs": refused}


def _entry(section: Section) -> dict[str, Any]:
    """Equal names (repeats of one configuration) keep the last: their predictions are the same."""
    found = section.summary()
    predicted = {f"{row.model} {row.what}": float(f"{row.predicted:.6g}") for row in section.comparisons}
    return {name: _short(found[name]) for name in ("mean_error", "worst_error")} | {"predicted": predicted}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def save(summary: dict[str, Any], path: Path) -> None:
    """As readable JSON with a line a row, so that a diff shows what a change did."""
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """A saved summary."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def moved(summary: dict[str, Any], before: dict[str, Any]) -> str:
    """A line for each section that changed, and its rows whose predictions did."""
    lines = []
    old, new = before["sections"], summary["sections"]
    for title in dict.fromkeys([*old, *new]):
        if title not in old or title not in new:
            lines.append(f"  {title}: {'new' if title in new else 'gone'}")
            continue
        lines += _section_lines(title, old[title], new[title])
    if before["refused_runs"] != summary["refused_runs"]:
        lines.append(f"  real runs refused: {before['refused_runs']} -> {summary['refused_runs']}")
    return "\n".join(["What moved since the baseline", *(lines or ["  nothing"])])


def _section_lines(title: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    was, now = old["predicted"], new["predicted"]
    rows = sorted(
        ((now[name] / was[name] - 1.0, name) for name in now if name in was and abs(now[name] / was[name] - 1.0) > MOVED),
        key=lambda row: -abs(row[0]),
    )
    errors = [(old[name], new[name]) for name in ("mean_error", "worst_error")]
    if not rows and was.keys() == now.keys():
        return []
    (mean, mean_now), (worst, worst_now) = errors
    others = f", {len(now.keys() - was.keys())} new, {len(was.keys() - now.keys())} gone" if was.keys() != now.keys() else ""
    head = f"  {title}: mean {mean:.2%} -> {mean_now:.2%}, worst {worst:.2%} -> {worst_now:.2%}; {len(rows)} rows moved{others}"
    listed = [f"    {change:+7.2%}  {name}" for change, name in rows[:SHOWN]]
    return [head, *listed, *([f"    and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])]
