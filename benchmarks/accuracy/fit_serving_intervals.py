"""Fit how much wider serving's intervals are for what no measured run has: `python -m evidence.fit
--only serving_intervals`; minutes, for the fits without a model, GPU or precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.accuracy import evidence, serving_groups
from benchmarks.accuracy.classes import extras, judged
from benchmarks.accuracy.groups import Group
from evidence.fitted_file import FittedFile
from hp_tool.domain.familiarity import SERVING

FIGURES = ("ttft", "tpot", "throughput")


def added(groups: Iterable[Group]) -> dict[str, dict[str, float]]:
    """Return {figure: {dimension: standard deviation that it adds}}.

    A dimension that no left-out run differs in adds as much as the one that adds most.
    """
    by_kind = judged(groups)
    found = {}
    for figure in FIGURES:
        own = extras(by_kind[f"serving dense, {figure}"], units=("release",))
        most = max(own.values())
        found[figure] = {name: float(f"{own.get(name, most):.2g}") for name in SERVING}
    return found


def fitted(folder: Path) -> Iterator[FittedFile]:
    """Yield what each dimension adds, from dense models."""
    groups = [
        *evidence.section("serving", folder),
        *serving_groups.shipped(folder),
        *serving_groups.refitted(folder),
    ]
    yield FittedFile(file="doubts.yaml", fields={"serving": added(groups)}, keeps=None)
