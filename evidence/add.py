"""Check a table of new measurements, and print how well the current constants predict it: `python
-m evidence.add TABLE [--json]`.

TABLE is a CSV file with the columns of training/ or serving/ (evidence/README.md). Rows whose
figures contradict each other are rejected by line number, and then nothing is predicted. Exit code
2: rows were rejected; 0 otherwise. Nothing is written: move the file into evidence/ to keep it.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy import inference
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.groups import figures
from benchmarks.accuracy.prepared import Prepared, compare_all
from benchmarks.accuracy.serving_runs import serving_run
from benchmarks.accuracy.tables import as_text
from evidence.cases import missing_fields, training_case, training_query, unknown_name
from evidence.schema import KINDS, SERVING, TRAINING, Kind
from evidence.table import RefusedError, Row, read
from hp_tool.errors import HpToolError
from hp_tool.questions.schema import parse_query, query_mapping

SERVED_COLUMNS = (
    "gpu",
    "precision",
    "input_length",
    "output_length",
    "concurrency",
    "tensor_parallel_size",
    "ttft_s",
    "tpot_s",
)
SERVED = {"tpot": "time per output token", "ttft": "time to first token", "throughput": "tokens/s"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.add", description=__doc__)
    parser.add_argument("table", type=Path, metavar="TABLE", help="CSV file of new rows")
    parser.add_argument(
        "--kind", choices=(TRAINING.name, SERVING.name), help="default: as the columns tell"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    kind = KINDS[options.kind] if options.kind else kind_of(options.table)
    try:
        rows = [row for row in read(options.table, kind) if not row["excluded"]]
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    reasons = [not_predicted(row, kind) for row in rows]
    asked = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    report = {
        "kind": kind.name,
        "rows": len(rows),
        "not_predicted": dict(Counter(reason for reason in reasons if reason)),
        "figures": {name: figures(each) for name, each in comparisons(asked, kind).items()},
    }
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def kind_of(path: Path) -> Kind:
    """Return whether a file has training or serving rows; only serving tables have a column for the
    engine.
    """
    with path.open(newline="", encoding="utf-8") as stream:
        names = next(csv.reader(stream), [])
    return SERVING if "engine" in names else TRAINING


def not_predicted(row: Row, kind: Kind) -> str | None:
    """Return the reason why no prediction is made for a row, or None if one is made."""
    if kind is TRAINING:
        return missing_fields(row) or _rejection(row)
    if row["disaggregated"]:
        return "prefill and decoding on GPUs of their own"
    blank = [name for name in SERVED_COLUMNS if row[name] is None]
    return f"no {', '.join(blank)}" if blank else unknown_name(row)


def _rejection(row: Row) -> str | None:
    """Return the reason why hp_tool rejects the row's settings as a query, or None."""
    try:
        parse_query(query_mapping(training_query(row)))
    except HpToolError as error:
        return str(error)
    return None


def comparisons(rows: Sequence[Row], kind: Kind) -> dict[str, list[Comparison]]:
    """Return {figure: comparisons of measured and predicted values} for the rows."""
    found = _compare_serving(rows) if kind is SERVING else _compare_training(rows)
    return {name: compared for name, compared in found.items() if compared}


def _compare_training(rows: Sequence[Row]) -> dict[str, list[Comparison]]:
    cases = [training_case(row) for row in rows]
    return {
        "step time": compare_all(
            [case for case in cases if case.step_s == case.step_s], Prepared.shipped
        ),
        "allocated memory": compare_all(
            [case for case in cases if case.allocated_bytes], Prepared.allocated
        ),
        "reserved memory": compare_all(
            [case for case in cases if case.reserved_bytes], Prepared.reserved
        ),
    }


def _compare_serving(rows: Sequence[Row]) -> dict[str, list[Comparison]]:
    pairs = inference.shipped_pairs([serving_run(row) for row in rows])
    return {words: inference.comparisons(pairs, name) for name, words in SERVED.items()}


if __name__ == "__main__":
    sys.exit(main())
