"""Saved results: the figures of a report, its predictions, and where the points of its pictures lie; and what moved since.

`result.json` is what docs/accuracy.md and README's table are made of, `baseline.json` an earlier one that reports are compared
with. Neither holds a measurement: a picture's points are rounded to what it shows.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.accuracy.groups import Group, pools

SAVED = Path(__file__).with_name("baseline.json")
RESULT = Path(__file__).with_name("result.json")
MOVED = 1e-3
"""Relative change of a prediction that counts as one."""
SHOWN = 8
"""Rows named in a group; the rest is counted."""
DRAWN = ("model", "GPU", "setting", "all")
"""Groups with points in pictures, by what their constants did not see."""
MOST_ROWS = 200
"""Groups of more rows are saved without their predictions."""


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """{groups: {title: {figures, parts, predicted: {row: figure}, points, ...}}, pooled, grid, days}."""
    groups: list[Group] = report["groups"]
    summary = {
        "groups": {group.title: _entry(group) for group in groups},
        "pooled": pools(groups),
        "grid": {name: value for name, value in (report["grid"] or {}).items() if name != "cells"},
        "days": {name: value for name, value in report["days"].items() if name != "configurations"},
        "not_stated": report["not_stated"],
    }
    return _short(summary)  # type: ignore[no-any-return]


def _entry(group: Group) -> dict[str, Any]:
    """Equal names (repeats of one configuration) keep the last: their predictions are the same."""
    counted = [row for row in group.rows if math.isfinite(row.predicted)]
    predicted = {f"{row.model} {row.what}": float(f"{row.predicted:.6g}") for row in counted}
    drawn = counted if group.left_out in DRAWN else []
    points = " ".join(f"{math.log10(row.published):.2f},{math.log10(row.predicted):.2f}" for row in drawn)
    kept = predicted if len(group.rows) <= MOST_ROWS else {}
    return {name: value for name, value in group.summary().items() if name != "title"} | {"predicted": kept, "points": points}


def _short(value: Any) -> Any:
    """Return a report rounded to four digits; predictions keep six."""
    if isinstance(value, dict):
        return {key: kept if key == "predicted" else _short(kept) for key, kept in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def save(summary: dict[str, Any], path: Path) -> None:
    """Write readable JSON with a line a row, so that a diff shows what a change did."""
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """A saved summary."""
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def moved(summary: dict[str, Any], before: dict[str, Any]) -> str:
    """A line for each group that changed, and its rows whose predictions did."""
    lines = []
    old, new = before["groups"], summary["groups"]
    for title in dict.fromkeys([*old, *new]):
        if title not in old or title not in new:
            lines.append(f"  {title}: {'new' if title in new else 'gone'}")
            continue
        lines += _group_lines(title, old[title], new[title])
    return "\n".join(["What moved since the baseline", *(lines or ["  nothing"])])


def _group_lines(title: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    was, now = old["predicted"], new["predicted"]
    rows = sorted(
        ((now[name] / was[name] - 1.0, name) for name in now if name in was and abs(now[name] / was[name] - 1.0) > MOVED),
        key=lambda row: -abs(row[0]),
    )
    if not rows and was.keys() == now.keys() and old["figures"] == new["figures"]:
        return []
    changes = ", ".join(
        f"{name.replace('_', ' ')} {old['figures'][name]:.4g} -> {value:.4g}"
        for name, value in new["figures"].items()
        if isinstance(value, float) and isinstance(old["figures"].get(name), float) and value != old["figures"][name]
    )
    others = f", {len(now.keys() - was.keys())} new, {len(was.keys() - now.keys())} gone" if was.keys() != now.keys() else ""
    if old["figures"]["refused"] != new["figures"]["refused"]:
        others += f", refused {old['figures']['refused']} -> {new['figures']['refused']}"
    listed = [f"    {change:+7.2%}  {name}" for change, name in rows[:SHOWN]]
    more = [f"    and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    return [f"  {title}: {len(rows)} rows moved{others}{'; ' if changes else ''}{changes}", *listed, *more]
