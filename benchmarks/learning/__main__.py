"""`python -m benchmarks.learning [--data DIR] [--sets NAME ...] [--seeds N] [--memory] [--save
FILE]`: calibrate with a few published runs and score the predictions of all other runs. `--memory`
scores peak memory only, which takes seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from threadpoolctl import threadpool_limits

from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.learning.memory import memory_text, peak_sets, score_memory
from benchmarks.learning.report import as_text
from benchmarks.learning.sets import run_sets
from benchmarks.learning.trials import score_set

BASELINE = Path(__file__).with_name("baseline.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    add_data_argument(parser)
    parser.add_argument("--sets", nargs="*", metavar="NAME", help="only sets whose name begins so")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--memory", action="store_true", help="peak memory alone")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--baseline",
        type=Path,
        default=BASELINE,
        metavar="FILE",
        help="figures to stand beside these",
    )
    arguments = parser.parse_args()
    folder = data_folder(arguments)
    with threadpool_limits(limits=1):
        print(
            memory_text(
                {
                    peaks.runs.name: score_memory(peaks, seeds=arguments.seeds)
                    for peaks in peak_sets(folder)
                }
            )
        )
    if arguments.memory:
        return
    wanted = [
        runs
        for runs in run_sets(folder)
        if not arguments.sets or runs.name.startswith(tuple(arguments.sets))
    ]
    with threadpool_limits(limits=1):
        scores = {runs.name: score_set(runs, seeds=arguments.seeds) for runs in wanted}
    baseline = json.loads(arguments.baseline.read_text()) if arguments.baseline.is_file() else None
    print(as_text(scores, baseline))
    if arguments.save:
        arguments.save.write_text(json.dumps(_rounded(scores), indent=1) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
