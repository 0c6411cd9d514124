"""Find the position of experts' layouts in the ranking.

`python -m benchmarks.recommend.experts [--data DIR] [--json]`. Each published layout keeps its
workload (batch, precision, knobs that change what is trained); only `parallel` varies. An expert's
layout is in group 1 if the 90% interval of the ratio of its step time to rank 1's contains 1, and
`slower` otherwise. For measured cells, the command also checks whether group 1 contains the fastest
row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.recommend.cells import cell_rows, judged_cells
from benchmarks.recommend.layouts import expert_cases
from evidence.cases import Case
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.questions.training import estimate
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.best import search_best
from hp_tool.questions.training.ranking.choice import recommendations_of
from hp_tool.wording.columns import configuration_columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """The position of one expert's layout in the ranking."""

    name: str
    what: str
    verdict: str
    """One of group 1, slower, infeasible, illegal and refused."""
    place: str = "-"
    """Rank among layouts, each with its best recomputation; `>N` if N layouts are faster and no
    more were ranked.
    """
    gap: float = math.nan
    """Predicted step time divided by that of rank 1, minus 1."""
    why: str = ""


def rank_expert_layout(case: Case) -> Standing:
    """Compare an expert's layout with the recommendation for its query."""
    free = dataclasses.replace(case.query, parallel=ParallelQuery(), rank_by="mean")
    try:
        theirs, problem = _published(case.query), resolve_training(free)
        best = search_best(problem, keep=10, rank_by="mean")
    except InputError as error:
        return Standing(name=case.name, what=case.what, verdict="refused", why=error.message)
    if theirs.time is None or not theirs.feasible:
        verdict = "infeasible" if theirs.time is not None else "illegal"
        return Standing(
            name=case.name,
            what=case.what,
            verdict=verdict,
            why="; ".join(one.message for one in theirs.reasons),
        )
    if not len(best.layout):
        return Standing(
            name=case.name, what=case.what, verdict="slower", why="nothing of ours fits"
        )
    ours = recommendations_of(best.take(np.arange(1)))[0].estimate
    assert ours.time is not None
    unmeasured = [
        set(each.familiarity.unmeasured) if each.familiarity else set() for each in (ours, theirs)
    ]
    bound = NORMAL_QUANTILE * float(
        ratio_log_sd(problem.profile, differing=len(unmeasured[0] ^ unmeasured[1]))
    )
    gap = theirs.time.step_s / ours.time.step_s - 1.0
    faster = len(set(best.layout[best.value_s < theirs.time.step_s].tolist()))
    reached = theirs.time.step_s <= best.value_s[-1]
    return Standing(
        name=case.name,
        what=case.what,
        verdict="group 1" if math.log1p(gap) <= bound else "slower",
        place=str(faster + 1) if reached else f">{faster}",
        gap=gap,
        why=_describe_difference(ours, theirs),
    )


def _published(query: Query) -> Estimate:
    """Return the fastest estimate of the configurations that a published layout leaves open."""
    left_open = isinstance(query.parallel.zero_stage, tuple)
    best = search_best(resolve_training(query), keep=1, rank_by="mean") if left_open else None
    if best is None or not len(best.layout):
        return estimate(query=query, with_fixes=False)
    return recommendations_of(best.take(np.arange(1)))[0].estimate


def _describe_difference(ours: Estimate, theirs: Estimate) -> str:
    """Return the changes from the expert's layout to rank 1, and the part that they shorten
    most.
    """
    assert (
        ours.time is not None
        and theirs.time is not None
        and ours.parallel is not None
        and theirs.parallel is not None
    )
    saved = {
        name: theirs.time.parts_s[name] - seconds for name, seconds in ours.time.parts_s.items()
    }
    part = max(saved, key=lambda name: saved[name])
    changed = _changes(theirs.parallel, ours.parallel)
    if not changed:
        return "it is ours"
    return (
        f"{changed} saves {saved[part] / theirs.time.step_s:.1%} of the step in "
        f"{part.replace('_', ' ')}"
    )


def _changes(before: ParallelConfig, after: ParallelConfig) -> str:
    columns = configuration_columns([before, after])
    varied = (each for each in columns if not each.is_constant)
    return ", ".join(f"{each.head} {' -> '.join(each.cells)}" for each in varied)


def summary(rows: Sequence[Standing]) -> dict[str, float]:
    """Return the number of layouts with each verdict."""
    return {
        name: count / len(rows)
        for name, count in Counter(row.verdict for row in rows).most_common()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_argument(parser)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = data_folder(arguments)
    cases, untold = expert_cases(folder)
    rows, cells = [rank_expert_layout(case) for case in cases], judged_cells(cell_rows(folder))
    if arguments.json:
        standings = [dataclasses.asdict(row) for row in rows]
        print(
            json.dumps(
                {"layouts": standings, "verdicts": summary(rows), "untold": untold, "cells": cells}
            )
        )
        return
    for row in rows:
        print(f"{row.verdict:10} {row.place:>4} {row.gap:+7.1%} {row.name}, {row.what}: {row.why}")
    print(
        f"{len(rows)} layouts: "
        + ", ".join(f"{name} {share:.0%}" for name, share in summary(rows).items())
    )
    print(f"{untold} rows skipped: no sequence length, or an unknown model")
    for source, figures in cells.items():
        print(f"{source}: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
