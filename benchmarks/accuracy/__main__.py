"""`python -m benchmarks.accuracy [--data DIR] [--json]`: print predictions beside published
figures.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.accuracy import report
from benchmarks.accuracy.data import add_data_argument, data_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=report.__doc__
    )
    add_data_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    evaluated = report.evaluate(data_folder(arguments))
    print(
        json.dumps(report.as_dict(evaluated), indent=2)
        if arguments.json
        else report.as_text(evaluated)
    )


if __name__ == "__main__":
    main()
