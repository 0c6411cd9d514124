"""`python -m benchmarks.accuracy [--data DIR] [--json] [--baseline FILE] [--save] [--save-baseline]`: predictions beside
published figures, and what moved since they were last saved."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.accuracy import baseline, report
from benchmarks.accuracy.data import add_data_argument, data_folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=report.__doc__)
    add_data_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--baseline", type=Path, default=baseline.SAVED, metavar="FILE", help="say what moved since this one")
    parser.add_argument("--save", action="store_true", help="keep the result, which benchmarks.accuracy.page makes pages of")
    parser.add_argument("--save-baseline", action="store_true", help="keep it in the file of --baseline")
    arguments = parser.parse_args()
    evaluated = report.evaluate(data_folder(arguments))
    print(json.dumps(report.as_dict(evaluated), indent=2) if arguments.json else report.as_text(evaluated))
    if not evaluated["groups"]:
        return
    summary = baseline.summarise(evaluated)
    if arguments.baseline.is_file():
        table = baseline.moved(summary, baseline.load(arguments.baseline))
        print(f"\n{table}", file=sys.stderr if arguments.json else sys.stdout)
    for wanted, path in ((arguments.save, baseline.RESULT), (arguments.save_baseline, arguments.baseline)):
        if wanted:
            baseline.save(summary, path)


if __name__ == "__main__":
    main()
