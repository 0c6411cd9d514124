"""`python -m benchmarks.accuracy.plain_recipe [--data DIR]`: runs asked with everything said, by a
recipe's name, and plainly.

Each by the constants as shipped and by those that saw no row of the model, as the groups of
docs/accuracy.md are; a plain question by its bare figure and by the one that today's recipe gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.groups import figures
from benchmarks.accuracy.plain import asked, named_cases, plain_cases, todays_cases, without_model
from benchmarks.accuracy.prepared import Prepared, compare_all
from evidence.cases import Case

QUESTIONS: Mapping[str, Callable[[Sequence[Case]], list[Case]]] = {
    "everything said": list,
    "recipe by name": named_cases,
    "plain, bare": plain_cases,
    "plain, today's recipe": todays_cases,
}


def evaluate(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of each question about runs of each kind."""
    return [
        {
            "runs": title,
            "question": question,
            **_figures("shipped", compare_all(queries, Prepared.shipped)),
            **_figures("model left out", without_model(folder, queries)),
        }
        for title, cases in asked(folder).items()
        for question, worded in QUESTIONS.items()
        for queries in [worded(cases)]
    ]


def _figures(constants: str, rows: list[Comparison]) -> dict[str, Any]:
    found = figures(rows)
    names = ("rows", "configurations", "mean_error", "median_error", "coverage", "width", "refused")
    return {f"{constants}: {name}": found[name] for name in names}


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate)
