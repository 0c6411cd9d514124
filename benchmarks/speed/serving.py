"""`python -m benchmarks.speed.serving [--peer PYTHON] [--json]`: serving candidates a second on one core, and a full answer.

The answer is a ranking under targets with its throughput front, as a library call. `--peer` names the interpreter of an
environment with aiconfigurator; its answer to the same question is then timed beside ours, in a process of its own, warm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

import numpy as np

from benchmarks.speed.measure import cpu_seconds
from hp_tool.answers import recommend_answer
from hp_tool.queries.schema import parse_query
from hp_tool.serving.problem import resolve_serving
from hp_tool.serving.recommend import CHUNK
from hp_tool.space.serving import serving_space

QUERY: dict[str, Any] = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {"input_length": 4000, "output_length": 1000, "concurrency": 256, "precision": "fp8", "engine": "trtllm"},
    "targets": {"ttft_s": 10.0, "tpot_s": 0.05},
}
LIMITS = {"candidates_per_second": 1e6, "answer_s": 0.3}
PEER = """
import json, logging, sys, time
logging.disable(logging.CRITICAL)
from aiconfigurator.cli.api import cli_default
asked = dict(model_path="Qwen/Qwen3-32B", total_gpus=8, system="h200_sxm", backend="trtllm", isl=4000, osl=1000,
             ttft=10000.0, tpot=50.0)
times = []
for _ in range(3):
    start = time.process_time()
    cli_default(**asked)
    times.append(time.process_time() - start)
print("TIMES " + json.dumps(times))
"""


def candidates_per_second() -> dict[str, float]:
    """Latencies, throughput, memory and limit of every candidate: configurations times batch limits times loads."""
    query = parse_query(QUERY)
    problem = resolve_serving(query)
    limits = {"max_num_seqs": [8 * k for k in range(1, 65)], "max_num_batched_tokens": [1024 * k for k in range(1, 17)]}
    asked = parse_query(QUERY | {"parallel": limits})
    candidates, _ = serving_space(query=asked.parallel, case=problem, concurrency=tuple(range(8, 257, 8)))
    chunks = [candidates.take(slice(first, first + CHUNK)) for first in range(0, len(candidates), CHUNK)]
    seconds = cpu_seconds(lambda: [problem.costed(chunk) for chunk in chunks])
    n = len(candidates)
    return {"candidates": n, "per_second": n / seconds["best"], "per_second_median": n / seconds["median"]}


def answer_seconds() -> dict[str, float]:
    """Ranking and front of one query, in this process."""
    query = parse_query(QUERY)
    found = cpu_seconds(lambda: recommend_answer(query, top=10, pareto="throughput"))
    return {"best_s": found["best"], "median_s": found["median"]}


def peer_seconds(python: str) -> dict[str, float] | str:
    """Processor seconds of aiconfigurator's answers, first and warm, or the end of what it said instead."""
    done = subprocess.run([python, "-c", PEER], capture_output=True, text=True, timeout=300, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("TIMES ")), None)
    if line is None:
        return done.stderr[-500:]
    first, *warm = json.loads(line.removeprefix("TIMES "))
    return {"first_s": first, "warm_s": float(np.median(warm))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.serving", description=__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter of an environment with aiconfigurator")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"candidates": candidates_per_second(), "answer": answer_seconds()}
    if arguments.peer:
        found["peer"] = peer_seconds(arguments.peer)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    rate, answer = found["candidates"], found["answer"]
    print(
        f"{rate['candidates']:,} serving candidates: {rate['per_second'] / 1e6:.2f} million/s on one core (median "
        f"{rate['per_second_median'] / 1e6:.2f}; at least {LIMITS['candidates_per_second'] / 1e6:.0f})"
    )
    print(f"ranking and front: {answer['best_s'] * 1e3:.0f} ms (median {answer['median_s'] * 1e3:.0f}; at most 300)")
    if "peer" in found:
        print(f"aiconfigurator: {found['peer']}")


if __name__ == "__main__":
    main()
