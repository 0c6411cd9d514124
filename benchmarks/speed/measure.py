"""Timings on one core by processor time, since machines are shared; the process also by wall clock,
as a user sees it.
"""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.workloads import (
    EXPERT_QUERY,
    GROWTH,
    legal_space,
    query_lines,
    single_queries,
)
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.query import Query
from hp_tool.questions import schema
from hp_tool.questions.answers import answer_lines
from hp_tool.questions.training import estimate, recommend
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.rank import keep_heap
from hp_tool.space.enumerate import CHUNK

REPEATS = 7
LIMITS = {
    "candidates_per_second": 3e6,
    "unlike_over_alike": 0.6,
    "estimates_per_second": 3e3,
    "million_ranked_s": 0.5,
    "ten_million_ranked_s": 5.0,
    "ten_million_peak_bytes": 2.0**30,
    "recommend_call_s": 0.3,
    "recommend_process_s": 1.2,
}
"""What a release must reach on one core of a common server; per million candidates where a space
has not exactly so many.
"""


def cpu_seconds(call: Callable[[], object], *, repeats: int = REPEATS) -> dict[str, float]:
    """Processor seconds of one call: {best, median}. The collector of garbage is off, as a
    long-lived process has it warm.
    """
    call()
    times = []
    gc.disable()
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    gc.enable()
    return {"best": min(times), "median": statistics.median(times)}


def cost_all(problem: TrainingProblem, chunks: list[Candidates]) -> None:
    """Full memory and time parts of every candidate, chunk by chunk."""
    for chunk in chunks:
        problem.costs(chunk)


def candidates_per_second(query: Query) -> dict[str, Any]:
    """All parts of all legal candidates of a space, beside two baselines of the same run: NumPy's
    additions, and the same candidates one by one.
    """
    problem, chunks = legal_space(query)
    keep_heap()
    batch = cpu_seconds(lambda: cost_all(problem, chunks))
    candidates = Candidates.concatenate(chunks)
    n = len(candidates)
    few = [Candidates.alone(candidates.config(row)) for row in range(0, n, max(n // 500, 1))]
    alone = cpu_seconds(lambda: [problem.costs(one) for one in few], repeats=3)
    x = np.random.default_rng(0).random(CHUNK)
    addition = cpu_seconds(lambda: [x + x for _ in range(1000)])
    return {
        "model": problem.model.name,
        "candidates": n,
        "per_second": n / batch["best"],
        "per_second_median": n / batch["median"],
        "baseline_one_by_one_per_second": len(few) / alone["best"],
        "baseline_numpy_additions_per_second": 1000 * CHUNK / addition["best"],
    }


def estimates_per_second(count: int = 400) -> dict[str, Any]:
    """Single estimates, no two alike: as a call on a parsed query, and from a JSON line to a JSON
    line.
    """
    queries = single_queries(count)
    lines = query_lines(queries)
    call = cpu_seconds(lambda: [estimate(query=query, with_fixes=False) for query in queries])
    line = cpu_seconds(lambda: [answer_lines([one], task="estimate", top=1)[0] for one in lines])
    parse = cpu_seconds(lambda: [schema.parse_query(one) for one in lines])
    return {
        "queries": count,
        "per_second": count / call["best"],
        "per_second_median": count / call["median"],
        "json_lines_per_second": count / line["best"],
        "json_lines_per_second_median": count / line["median"],
        "baseline_parse_alone_per_second": count / parse["best"],
    }


def growth() -> dict[str, Any]:
    """`recommend` as a library call on spaces of a thousand to ten million candidates: enumerated,
    filtered, costed and ranked, each in a process of its own, whose peak of resident memory is the
    whole interpreter's. The exponent is taken above 10,000, where fixed costs no longer show.
    """
    rows = []
    for step in range(len(GROWTH)):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.speed.ranked", str(step)],
            capture_output=True,
            check=True,
            text=True,
        )
        rows.append(json.loads(done.stdout))
    decades = math.log(rows[-1]["candidates"] / rows[1]["candidates"])
    return {"rows": rows, "exponent": math.log(rows[-1]["cpu_s"] / rows[1]["cpu_s"]) / decades}


def recommend_process(repeats: int = 5) -> dict[str, Any]:
    """`recommend` of Llama 3.1 405B on 2,048 devices, all axes free: as a library call, and
    `hp-tool recommend` as a process: interpreter, imports, search and output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "query.json"
        path.write_text(json.dumps(EXPERT_QUERY))
        command = [
            sys.executable,
            "-c",
            "from hp_tool.cli.main import main; main()",
            "recommend",
            str(path),
            "--json",
        ]
        wall, cpu = [], []
        for _ in range(repeats):
            before, start = os.times(), time.perf_counter()
            done = subprocess.run(command, capture_output=True, check=True)
            wall.append(time.perf_counter() - start)
            after = os.times()
            cpu.append(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system
            )
    answer = json.loads(done.stdout)
    assert answer["status"] == "ok" and answer["recommendations"]
    query = schema.parse_query(EXPERT_QUERY)
    return {
        "call_s": cpu_seconds(lambda: recommend(query=query))["best"],
        "wall_median_s": statistics.median(wall),
        "cpu_median_s": statistics.median(cpu),
        "cpu_best_s": min(cpu),
        "runs": repeats,
        "space": answer["space"],
    }
