"""`python -m benchmarks.accuracy.plain_recipe --data DIR`: plain questions by the defaults and by today's recipe."""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.dgxc_runs import dgxc_cases
from benchmarks.accuracy.heldout import Case
from benchmarks.accuracy.mlperf_runs import mlperf_cases
from benchmarks.accuracy.plain import plain_cases
from benchmarks.accuracy.recipe_runs import pretraining
from hp_tool.errors import HpToolError
from hp_tool.training import estimate
from hp_tool.training.with_recipe import with_recipe_figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Errors of one kind of question, one a configuration."""

    title: str
    rows: int
    refused: int
    """Real runs without a step by the defaults, and so without a recipe's."""
    bare: list[float]
    recipe: list[float]
    inside: float
    """Share of the measured steps in the bare figure's interval."""


def plain(folder: Path) -> Iterator[Plain]:
    """Yield every group with the constants as shipped."""
    audited, cloud = mlperf_cases(folder), dgxc_cases(folder)
    groups = {
        "dense on H100": cloud,
        "MLPerf's pre-training": [case for case in audited if case.task == "pretrain"],
        "MLPerf's LoRA": [case for case in audited if case.task == "lora" and not case.card.startswith("mi3")],
        "mixtures of experts": [case for case in pretraining(folder) if case.has_experts],
    }
    for title, cases in groups.items():
        yield _group(title, cases)


def _group(title: str, cases: Iterable[Case]) -> Plain:
    bare: dict[str, list[float]] = {}
    recipe: dict[str, list[float]] = {}
    inside: dict[str, list[float]] = {}
    cases, refused = list(cases), 0
    for case in plain_cases(cases):
        try:
            answer = with_recipe_figure(estimate(query=case.query, with_fixes=False), query=case.query)
        except HpToolError:
            refused += 1
            continue
        if answer.time is None or answer.intervals is None:
            refused += 1
            continue
        key, (low, high) = str(case.query), answer.intervals.step_s
        step_s = answer.time.step_s if answer.with_recipe is None else answer.with_recipe.step_s
        bare.setdefault(key, []).append(answer.time.step_s / case.step_s - 1.0)
        recipe.setdefault(key, []).append(step_s / case.step_s - 1.0)
        inside.setdefault(key, []).append(float(low <= case.step_s <= high))
    return Plain(
        title=title, rows=len(cases), refused=refused, bare=[*map(statistics.median, bare.values())],
        recipe=[*map(statistics.median, recipe.values())], inside=statistics.mean(map(statistics.mean, inside.values())),
    )  # fmt: skip


def _mean(errors: Iterable[float]) -> float:
    return math.fsum(map(abs, errors)) / max(len(list(errors)), 1)


def main(arguments: list[str] | None = None) -> None:
    """Print a line a group."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.plain_recipe", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("HP_REFERENCE_DATA"), help="folder of measured figures")
    folder = parser.parse_args(arguments).data
    if folder is None:
        parser.error("name a folder by --data or HP_REFERENCE_DATA")
    for group in plain(Path(folder)):
        print(
            f"{group.title}: {len(group.bare)} configurations of {group.rows} rows, {group.refused} refused; "
            f"bare {_mean(group.bare):.1%}, {group.inside:.0%} inside; with today's recipe {_mean(group.recipe):.1%}"
        )


if __name__ == "__main__":
    main()
