"""`python -m benchmarks.speed.batch [--lines N] [--jobs N] [--json]`: measure `hp-tool batch` on a
large file.

The report has the lines per second of wall time and of processor time, and the peak resident memory
of the largest process, for N lines and for a tenth of them. Both peaks are equal if memory is
bounded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.speed.measure import HP_TOOL, time_command
from benchmarks.speed.workloads import query_lines, single_queries

NUM_DISTINCT_QUERIES = 400
"""Number of queries drawn from the space of GPT-3 175B on 1,024 devices. The file repeats them,
each time with another id.
"""


def run_batch(lines: int, *, jobs: int) -> dict[str, Any]:
    """Return rate and peak memory of one batch in an empty folder, without a database."""
    queries = [json.loads(line) for line in query_lines(single_queries(NUM_DISTINCT_QUERIES))]
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "queries.jsonl").open("w") as stream:
            for number, query in enumerate(itertools.islice(itertools.cycle(queries), lines)):
                stream.write(json.dumps(query | {"id": str(number)}) + "\n")
        options = ("--output=answers.jsonl", "--no-calibration", f"--jobs={jobs}")
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        run = time_command(
            (*HP_TOOL, "batch", "queries.jsonl", *options), cwd=folder, env=environment
        )
        with (Path(folder) / "answers.jsonl").open() as stream:
            answered = [json.loads(line)["id"] for line in stream]
    assert answered == [str(number) for number in range(lines)]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "lines": lines,
        "jobs": jobs,
        "wall_s": run.wall_s,
        "cpu_s": run.cpu_s,
        "per_second": lines / run.wall_s,
        "per_cpu_second": lines / run.cpu_s,
        "peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.batch", description=__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    # The smaller batch comes first, because getrusage returns the peak of all processes so far.
    batches = [
        run_batch(lines, jobs=arguments.jobs)
        for lines in (max(arguments.lines // 10, 1), arguments.lines)
    ]
    if arguments.json:
        print(json.dumps({"batches": batches}))
        return
    for one in batches:
        print(
            f"{one['lines']:,} lines, {one['jobs']} jobs: {one['per_second']:,.0f} lines/s "
            f"({one['per_cpu_second']:,.0f} per second of processor time), peak memory "
            f"{one['peak_bytes'] / 2**20:.0f} MiB per process"
        )


if __name__ == "__main__":
    main()
