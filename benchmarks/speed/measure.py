"""Measure rankings and estimates of training on one core.

Times are processor times, because machines are shared. Times of whole commands include wall time.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""Limits that a release must meet on one core of a common server. Times of rankings are scaled to
exactly one or ten million candidates.
"""
HP_TOOL = (sys.executable, "-c", "from hp_tool.cli.main import main; main()")
"""Start of a command line that runs this tree's `hp-tool`."""


@dataclass(frozen=True)
class TimedCommand:
    """Times and output of a command that ran as a process."""

    cpu_s: float
    wall_s: float
    stdout: bytes


def time_command(command: Sequence[str], **options: Any) -> TimedCommand:
    """Run a command and return its times; `options` are those of subprocess.run.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    before = os.times()
    done = subprocess.run(command, capture_output=True, check=True, **options)
    after = os.times()
    cpu_s = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return TimedCommand(cpu_s, after.elapsed - before.elapsed, done.stdout)


def cpu_seconds(call: Callable[[], object], *, repeats: int = REPEATS) -> dict[str, float]:
    """Return the best and the median processor time of a call in seconds.

    The garbage collector is off, because it rarely runs in a long-lived process.
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


def candidates_per_second(query: Query) -> dict[str, Any]:
    """Return how many legal candidates of a space are costed per second, with all parts of memory
    and time.

    Two baselines run in the same process: candidates costed one by one, and additions in NumPy.
    """
    problem, chunks = legal_space(query)
    keep_heap()
    batch = cpu_seconds(lambda: [problem.costs(chunk) for chunk in chunks])
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
    """Return how many different estimates are computed per second, from parsed queries and from
    JSON lines to JSON lines.
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


def measure_growth() -> dict[str, Any]:
    """Return time and peak memory of `recommend` on spaces of a thousand to 40 million candidates.

    Each space is ranked in a new process, whose resident memory includes the interpreter. The
    exponent of the growth is fitted above 10,000 candidates, where fixed costs are negligible.
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


def time_recommend(repeats: int = 5) -> dict[str, Any]:
    """Return the time of ranking all layouts of Llama 3.1 405B on 2,048 devices, as a library call
    and as an `hp-tool recommend` command.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "query.json"
        path.write_text(json.dumps(EXPERT_QUERY))
        command = (*HP_TOOL, "recommend", str(path), "--json")
        runs = [time_command(command) for _ in range(repeats)]
    answer = json.loads(runs[-1].stdout)
    assert answer["status"] == "ok" and answer["recommendations"]
    query = schema.parse_query(EXPERT_QUERY)
    return {
        "call_s": cpu_seconds(lambda: recommend(query=query))["best"],
        "wall_median_s": statistics.median(run.wall_s for run in runs),
        "cpu_median_s": statistics.median(run.cpu_s for run in runs),
        "cpu_best_s": min(run.cpu_s for run in runs),
        "runs": repeats,
        "space": answer["space"],
    }
