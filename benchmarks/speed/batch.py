"""`python -m benchmarks.speed.batch [--lines N] [--jobs N] [--json]`: `hp-tool batch` on a large
file, as a process.

Rate by wall clock and by processor time, and peak of resident memory (the largest process) of a
batch of N lines and of one of a tenth: a batch in bounded memory needs the same for both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.speed.workloads import query_lines, single_queries

DIFFERENT = 400
"""Queries drawn from the space of GPT-3 175B on 1,024 devices; the file repeats them under ids of
their own.
"""


def batch(lines: int, *, jobs: int) -> dict[str, Any]:
    """One batch, in an empty folder and without a database."""
    queries = [json.loads(line) for line in query_lines(single_queries(DIFFERENT))]
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "queries.jsonl").open("w") as stream:
            for number, query in enumerate(itertools.islice(itertools.cycle(queries), lines)):
                stream.write(json.dumps(query | {"id": str(number)}) + "\n")
        command = [
            sys.executable,
            "-c",
            "from hp_tool.cli.main import main; main()",
            "batch",
            "queries.jsonl",
            "--output=answers.jsonl",
            "--no-calibration",
            f"--jobs={jobs}",
        ]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        before, start = os.times(), time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, env=environment, capture_output=True)
        wall, after = time.perf_counter() - start, os.times()
        with (Path(folder) / "answers.jsonl").open() as stream:
            answered = [json.loads(line)["id"] for line in stream]
    assert answered == [str(number) for number in range(lines)]
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "lines": lines,
        "jobs": jobs,
        "wall_s": wall,
        "cpu_s": cpu,
        "per_second": lines / wall,
        "per_cpu_second": lines / cpu,
        "peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.batch", description=__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    # The smaller one first: the peak is that of all processes so far.
    batches = [
        batch(lines, jobs=arguments.jobs)
        for lines in (max(arguments.lines // 10, 1), arguments.lines)
    ]
    if arguments.json:
        print(json.dumps({"batches": batches}))
        return
    for one in batches:
        print(
            f"{one['lines']:,} lines, {one['jobs']} jobs: {one['per_second']:,.0f} lines/s "
            f"({one['per_cpu_second']:,.0f} "
            f"a second of processor time), at most {one['peak_bytes'] / 2**20:.0f} MiB a process"
        )


if __name__ == "__main__":
    main()
