"""Groups of evidence: predicted rows of one kind, the rows that their constants were fitted to, and
the error statistics.

Rows of one setting (releases or submitters of a configuration) share one vote, their median.
Coverage is compared with the range that contains 95% of samples of as many votes if the intervals
are right. The interval score is that of Gneiting and Raftery (Journal of the American Statistical
Association 102, 2007, section 6.2) on logarithms: the width, plus 2 / 0.1 times the distance
outside the interval.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
from scipy.stats import binom

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.tables import as_text
from hp_tool.cost.uncertainty import CONFIDENCE, NORMAL_QUANTILE

MANY_ROWS = 40
"""Number of rows above which a table shows parts instead of rows; `--json` has all rows."""
OUTSIDE = 2.0 / (1.0 - CONFIDENCE)
"""Factor on a figure's distance outside its interval, in the score."""

FORMULAS = "no rows (formulas only)"
OPS = "timed kernels and Tables 4 and 5 of arXiv 2205.05198"
TODAY = "published Megatron Core runs"
"""Recipes on H100, DGX Cloud's Llama 3, MLPerf pre-training, recipes and reduced models on B200,
and MoE recipes.
"""
LeftOut = Literal["model", "GPU", "setting", "framework", "future", "all", "seen"]
"""What the constants of a group were fitted without: the rows' model, their GPU (card or die),
their setting (layout, number of nodes, or load), their framework, everything of their month and
later, or all similar rows. `seen`: the constants were fitted to the rows, or this repository
contains the figures.
"""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Predicted and published figures of one kind, all predicted by constants fitted in the same
    way.
    """

    title: str
    left_out: LeftOut
    saw: str
    """Rows to which the constants of these predictions were fitted."""
    rows: list[Comparison]
    unit: str = "s"
    is_long: bool = False
    """Whether the group needs fits that take minutes; CI omits it."""
    pool: str = "training steps"
    """Name of the report's pool of rows, by predicted quantity; empty: none."""
    classed: str = ""
    """Familiarity table that the rows count for: `training`, or `serving` and a figure. A kind of
    model after it restricts the rows to that kind.
    """

    @property
    def parts(self) -> dict[str, list[Comparison]]:
        """Return the rows by GPU or release, in order."""
        parts: dict[str, list[Comparison]] = {}
        for row in self.rows:
            parts.setdefault(row.part, []).append(row)
        return dict(
            sorted(
                parts.items(), key=lambda item: (not item[0][:1].isdigit(), len(item[0]), item[0])
            )
        )

    def as_dict(self) -> dict[str, Any]:
        rows = [
            vars(row) | {"predicted": _finite(row.predicted), "error": _finite(row.error)}
            for row in self.rows
        ]
        return self.summary() | {"rows": rows}

    def summary(self) -> dict[str, Any]:
        """Return {title, left_out, saw, unit, figures, parts: {name: figures}}."""
        return {
            "title": self.title,
            "left_out": self.left_out,
            "saw": self.saw,
            "unit": self.unit,
            "figures": figures(self.rows),
            "parts": {name: figures(rows) for name, rows in self.parts.items()},
        }

    def as_text(self) -> str:
        """Return the rows and their figures as text; for many rows, the figures of each part
        instead of the rows.
        """
        parts = {name: figures(rows) for name, rows in self.parts.items()}
        rows = [
            {
                **{
                    name: getattr(row, name) for name in ("model", "what", "published", "predicted")
                },
                "error": row.error,
                "refused": row.refused,
            }
            for row in self.rows
        ]
        listed = {"rows": rows} if len(rows) <= MANY_ROWS else {}
        return as_text(
            {
                f"{self.title} ({self.unit})": {
                    "left out": self.left_out,
                    "constants from": self.saw,
                    **listed,
                    "figures": {"all": figures(self.rows), **parts},
                }
            }
        )


Rows = dict[str, list[Comparison]]
"""Comparisons by the title of their group."""


@functools.cache
def _entries_by_title() -> dict[str, dict[str, str]]:
    with Path(__file__).with_name("groups.csv").open(newline="", encoding="utf-8") as stream:
        return {line.pop("title"): line for line in csv.DictReader(stream)}


def as_groups(rows: Rows, *, is_long: bool = False) -> list[Group]:
    """Return the groups with these titles, with their entries in groups.csv."""
    found = []
    for title, members in rows.items():
        known = _entries_by_title()[title]
        left_out = next(each for each in get_args(LeftOut) if each == known["left_out"])
        saw = known["saw"].format(today=TODAY, ops=OPS, formulas=FORMULAS)
        found.append(
            Group(
                title=title,
                left_out=left_out,
                saw=saw,
                rows=members,
                is_long=is_long,
                **{name: known[name] for name in ("unit", "pool", "classed")},
            )
        )
    return found


def with_gpu(row: Comparison, card: str) -> Comparison:
    """Return the row with `card` as its GPU."""
    return replace(row, gpu=card, part=card)


def votes(rows: Iterable[Comparison]) -> list[Comparison]:
    """Return one row per setting: the row with the median ratio of published to predicted. Rows
    without a prediction have no vote.
    """
    grouped: dict[str, list[Comparison]] = {}
    for row in rows:
        if math.isfinite(row.predicted):
            grouped.setdefault(row.setting or f"{row.model} {row.what} {len(grouped)}", []).append(
                row
            )
    return [_median(members) for members in grouped.values()]


def _median(members: Sequence[Comparison]) -> Comparison:
    """Return the newest row, with its published figure changed to give the median ratio of the
    members.
    """
    last = members[-1]
    return replace(
        last, published=last.predicted * median(row.published / row.predicted for row in members)
    )


def figures(rows: Sequence[Comparison]) -> dict[str, Any]:
    """Return the error statistics of these rows. bias is predicted / published - 1; width is high /
    low of the interval.
    """
    counted = votes(rows)
    refused = dict(Counter(row.refused for row in rows if row.refused))
    summary: dict[str, Any] = {
        "rows": len(rows),
        "configurations": len(counted),
        "refused": refused,
    }
    if not counted:
        return summary
    errors = np.abs([row.error for row in counted])
    worst = counted[int(errors.argmax())]
    summary |= {
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "worst_error": float(errors.max()),
        "worst": f"{worst.model}, {worst.what}: {worst.error:+.1%}".removeprefix(", "),
        "bias": math.expm1(-float(np.mean([row.log_ratio for row in counted]))),
    }
    return summary | intervals([row for row in counted if row.low and row.high])


def intervals(counted: Sequence[Comparison]) -> dict[str, Any]:
    """Return coverage, the coverage range expected if the intervals are right, median width and
    mean score of the rows with intervals.
    """
    if not counted:
        return {}
    low, high, published = (
        np.log([float(getattr(row, name)) for row in counted])
        for name in ("low", "high", "published")
    )
    outside = np.maximum(low - published, 0.0) + np.maximum(published - high, 0.0)
    n = len(counted)
    return {
        "coverage": float((outside == 0.0).mean()),
        "coverage_range": [float(binom.ppf(tail, n, CONFIDENCE)) / n for tail in (0.025, 0.975)],
        "width": float(np.exp(np.median(high - low))),
        "interval_score": float((high - low + OUTSIDE * outside).mean()),
    }


def pools(groups: Iterable[Group]) -> dict[str, dict[str, Any]]:
    """Return error statistics by predicted quantity, over all rows that the constants of their
    framework were not fitted to. A row that two groups hold out in different ways counts once, in
    the first group.
    """
    by_kind: dict[str, list[Comparison]] = {}
    known: set[tuple[str, str, str]] = set()
    for group in groups:
        if group.left_out in ("seen", "framework") or not group.pool:
            continue
        names = [(group.unit, row.model, row.what) for row in group.rows]
        by_kind.setdefault(group.pool, []).extend(
            row for row, name in zip(group.rows, names, strict=True) if name not in known
        )
        known.update(names)
    return {kind: figures(rows) for kind, rows in by_kind.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def scatter_of(kinds: Iterable[Sequence[tuple[Comparison, float]]]) -> float:
    """Return the standard deviation that must be added to the known variance of each row for the
    central 90% of normal distributions to contain 90% of the rows; each kind has the same weight.
    """
    lacking, weights = [], []
    for rows in kinds:
        lacking += [(row.log_ratio / NORMAL_QUANTILE) ** 2 - known for row, known in rows]
        weights += [1.0 / len(rows)] * len(rows)
    if not lacking:
        return 0.0
    order = np.argsort(lacking)
    share = np.cumsum(np.array(weights)[order]) / (
        sum(weights) + max(weights)
    )  # one more value is to come
    place = min(int(np.searchsorted(share, CONFIDENCE)), len(lacking) - 1)
    return math.sqrt(max(lacking[order[place]], 0.0))
