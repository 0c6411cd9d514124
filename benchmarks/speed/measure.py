"""Timings on one core by processor time, since machines are shared; the process as a user sees it by wall clock."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.workloads import QUERY, dense_query, dense_space, query_lines, repeated, single_queries
from hp_tool import schema
from hp_tool.answers import answer_line
from hp_tool.app import estimate
from hp_tool.cost.candidates import Candidates
from hp_tool.problem import TrainingProblem
from hp_tool.ranking import cost_space
from hp_tool.space.enumerate import CHUNK

REPEATS = 7
LIMITS = {"candidates_per_second": 3e6, "estimates_per_second": 3e3, "recommend_process_s": 1.5}
"""What a release must reach on one core of a common server."""


def cpu_seconds(call: Callable[[], object], *, repeats: int = REPEATS) -> dict[str, float]:
    """Processor seconds of one call: {best, median}. The collector of garbage is off, as a long-lived process has it warm."""
    call()
    times = []
    gc.disable()
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    gc.enable()
    return {"best": min(times), "median": statistics.median(times)}


def cost_all(problem: TrainingProblem, candidates: Candidates) -> None:
    """Full memory and time parts of every candidate, chunk by chunk."""
    for start in range(0, len(candidates), CHUNK):
        problem.costs(candidates.take(slice(start, start + CHUNK)))


def candidates_per_second() -> dict[str, Any]:
    """The dense space, beside two baselines of the same run: NumPy's additions, and the same candidates one by one."""
    problem, candidates = dense_space()
    n = len(candidates)
    batch = cpu_seconds(lambda: cost_all(problem, candidates))
    whole = cpu_seconds(lambda: cost_space(query=dense_query(), problem=problem), repeats=3)
    few = [Candidates.alone(candidates.config(row)) for row in range(0, n, max(n // 500, 1))]
    alone = cpu_seconds(lambda: [problem.costs(one) for one in few], repeats=3)
    x = np.random.default_rng(0).random(CHUNK)
    addition = cpu_seconds(lambda: [x + x for _ in range(1000)])
    return {
        "candidates": n,
        "per_second": n / batch["best"],
        "per_second_median": n / batch["median"],
        "per_second_with_enumeration_and_filter": n / whole["best"],
        "baseline_one_by_one_per_second": len(few) / alone["best"],
        "baseline_numpy_additions_per_second": 1000 * CHUNK / addition["best"],
    }


def estimates_per_second(count: int = 400) -> dict[str, Any]:
    """Single estimates, no two alike: as a call on a parsed query, and from a JSON line to a JSON line."""
    queries = single_queries(count)
    lines = query_lines(queries)
    call = cpu_seconds(lambda: [estimate(query=query, with_mends=False) for query in queries])
    line = cpu_seconds(lambda: [answer_line(one, task="estimate", top=1) for one in lines])
    parse = cpu_seconds(lambda: [schema.parse_query(one) for one in lines])
    return {
        "queries": count,
        "per_second": count / call["best"],
        "per_second_median": count / call["median"],
        "json_lines_per_second": count / line["best"],
        "json_lines_per_second_median": count / line["median"],
        "baseline_parse_alone_per_second": count / parse["best"],
    }


def growth(sizes: tuple[int, ...] = (100, 1_000, 10_000, 100_000, 1_000_000)) -> dict[str, Any]:
    """Seconds and peak memory over four decades; the exponent of time above 10,000, where fixed costs no longer show."""
    problem, candidates = dense_space()
    rows = []
    for size in sizes:
        many = repeated(candidates, size=size)
        seconds = cpu_seconds(lambda many=many: cost_all(problem, many), repeats=3)["best"]  # type: ignore[misc]
        tracemalloc.start()
        cost_all(problem, many)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append({"candidates": size, "cpu_s": seconds, "microseconds_each": 1e6 * seconds / size, "peak_bytes": peak})
    large = [row for row in rows if row["candidates"] >= 10_000]
    decades = math.log(large[-1]["candidates"] / large[0]["candidates"])
    return {"rows": rows, "exponent": math.log(large[-1]["cpu_s"] / large[0]["cpu_s"]) / decades}


def recommend_process(repeats: int = 5) -> dict[str, Any]:
    """`hp-tool recommend` for 175B on 1,024 devices as a process: interpreter, imports, search and output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "query.json"
        path.write_text(json.dumps(QUERY))
        command = [sys.executable, "-c", "from hp_tool.cli.main import main; main()", "recommend", str(path), "--json"]
        wall, cpu = [], []
        for _ in range(repeats):
            before, start = os.times(), time.perf_counter()
            done = subprocess.run(command, capture_output=True, check=True)
            wall.append(time.perf_counter() - start)
            after = os.times()
            cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
    answer = json.loads(done.stdout)
    assert answer["status"] == "ok" and answer["recommendations"]
    return {
        "wall_median_s": statistics.median(wall),
        "wall_best_s": min(wall),
        "cpu_median_s": statistics.median(cpu),
        "runs": repeats,
        "space": answer["space"],
    }
