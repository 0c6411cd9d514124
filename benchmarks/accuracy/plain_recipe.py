"""`python -m benchmarks.accuracy.plain_recipe [--data DIR]`: runs asked with everything said, by a
recipe's name, and plainly.

Each by the constants as shipped and by those that saw no row of the model, as the groups of
docs/accuracy.md are; a plain question by its bare figure and by the one that today's recipe gives.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import add_data_argument, data_folder
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


def measured(folder: Path) -> Iterator[tuple[str, str, list[Comparison], list[Comparison]]]:
    """Yield (runs, question, rows by shipped constants, rows with the model left out)."""
    for title, cases in asked(folder).items():
        for question, worded in QUESTIONS.items():
            queries = worded(cases)
            yield (
                title,
                question,
                compare_all(queries, Prepared.shipped),
                without_model(folder, queries),
            )


def _words(summary: Mapping[str, Any]) -> str:
    return (
        f"{summary['mean_error']:6.1%} {summary['median_error']:6.1%} "
        f"{summary['coverage']:6.0%} {summary['width']:6.2f}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each question about runs of each kind."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.plain_recipe", description=__doc__
    )
    add_data_argument(parser)
    folder = data_folder(parser.parse_args(arguments))
    print(
        f"{'':26}{'':24}rows configurations refused |  mean median inside high/low, shipped | the "
        "same, its model left out"
    )
    for title, question, shipped, unseen in measured(folder):
        summary, left_out = figures(shipped), figures(unseen)
        refused = sum(summary["refused"].values())
        counts = f"{summary['rows']:4} {summary['configurations']:14} {refused:7}"
        print(
            f"{title:26}{question:24}{counts} | {_words(summary)} | {_words(left_out)}", flush=True
        )


if __name__ == "__main__":
    main()
