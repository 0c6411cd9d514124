"""`python -m benchmarks.speed.serving [--peer PYTHON] [--data DIR] [--json]`: measure serving
candidates per second, and the time of a complete answer.

The answer is a ranking under latency targets at the highest load of each layout. It is timed as a
library call and as a command. With `--peer`, the Python interpreter of an environment with
aiconfigurator, the report also has aiconfigurator's answer, its time, and its errors on measured
runs (`peer_rows`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from typing import Any

from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.speed import peer_rows
from benchmarks.speed.measure import HP_TOOL, cpu_seconds, time_command
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.questions.answers import answer_recommend
from hp_tool.questions.schema import parse_query
from hp_tool.questions.serving.problem import resolve_serving
from hp_tool.questions.serving.ranked import CHUNK
from hp_tool.space.serving import serving_space
from hp_tool.wording.words import serving_arithmetic

QUERY: dict[str, Any] = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 256,
        "precision": "fp8",
        "engine": "trtllm",
    },
    "targets": {"ttft_s": 10.0, "tpot_s": 0.05},
}
QUESTION: dict[str, Any] = {
    "kind": "inference",
    "model": "llama-3.1-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "inference": {"input_length": 2000, "output_length": 500, "engine": "trtllm"},
    "targets": {"ttft_s": 1.0, "tpot_s": 0.03},
}
"""The best layouts under targets, each at the highest load that it sustains."""
LIMITS = {"candidates_per_second": 1e6, "answer_s": 0.3, "process_s": 1.5}
PEER = """
import json, logging, sys, time
logging.disable(logging.CRITICAL)
from aiconfigurator.cli.api import cli_default
asked = dict(model_path="meta-llama/Meta-Llama-3.1-70B", total_gpus=8, system="h100_sxm", backend="trtllm", isl=2000, osl=500,
             ttft=1000.0, tpot=30.0)
times = []
for _ in range(2):
    start = time.process_time()
    found = cli_default(**asked)
    times.append(time.process_time() - start)
shown = ("concurrency", "tokens/s/gpu", "ttft", "tpot", "parallel", "(p)parallel", "(d)parallel")
best = {mode: {name: str(rows.iloc[0][name]) for name in shown if name in rows} for mode, rows in found.best_configs.items()
        if len(rows)}
print("ANSWER " + json.dumps({"first_s": times[0], "warm_s": times[1], "best": best}))
"""  # noqa: E501


def candidates_per_second() -> dict[str, float]:
    """Return how many serving candidates are costed per second, with latencies, throughput and
    memory.
    """
    query = parse_query(QUERY)
    problem = resolve_serving(query)
    limits = {
        "max_num_seqs": [8 * k for k in range(1, 65)],
        "max_num_batched_tokens": [1024 * k for k in range(1, 17)],
    }
    parsed = parse_query(QUERY | {"parallel": limits})
    candidates, _ = serving_space(
        query=parsed.parallel, case=problem, concurrency=tuple(range(8, 257, 8))
    )
    chunks = [
        candidates.take(slice(first, first + CHUNK)) for first in range(0, len(candidates), CHUNK)
    ]
    seconds = cpu_seconds(lambda: [problem.cost_candidates(chunk) for chunk in chunks])
    n = len(candidates)
    return {
        "candidates": n,
        "per_second": n / seconds["best"],
        "per_second_median": n / seconds["median"],
    }


def time_answer() -> dict[str, Any]:
    """Return the best layout for QUESTION, and the processor seconds of the answer as a library
    call and as a command.
    """
    query = parse_query(QUESTION)
    seconds = cpu_seconds(lambda: answer_recommend(query, top=10))
    best = answer_recommend(query, top=1).recommendations[0]
    assert isinstance(best, ServingRecommendation)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(QUESTION, file)
        file.flush()
        command_s = time_command((*HP_TOOL, "recommend", file.name)).cpu_s
    e = best.estimate
    return {
        "best_s": seconds["best"],
        "median_s": seconds["median"],
        "process_s": command_s,
        "layout": serving_arithmetic(best.parallel, replicas=e.replicas),
        "concurrency": e.concurrency,
        "tokens_per_second_per_gpu": e.output_tokens_per_second_per_gpu,
        "ttft_s": e.ttft_s,
        "tpot_s": e.tpot_s,
    }


def peer_answer(python: str) -> dict[str, Any] | str:
    """Return aiconfigurator's best layout of each mode, and the processor seconds of its first and
    second call; if it fails, the end of its error output.
    """
    done = subprocess.run(
        [python, "-c", PEER], capture_output=True, text=True, timeout=300, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWER ")), None)
    if line is None:
        return done.stderr[-500:]
    answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.serving", description=__doc__)
    parser.add_argument(
        "--peer", metavar="PYTHON", help="interpreter of an environment with aiconfigurator"
    )
    add_data_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"candidates": candidates_per_second(), "question": time_answer()}
    if arguments.peer:
        report["peer"] = peer_answer(arguments.peer)
        report["rows"] = peer_rows.compare_errors(data_folder(arguments), arguments.peer)
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    rate, answer = report["candidates"], report["question"]
    print(
        f"{rate['candidates']:,} serving candidates: {rate['per_second'] / 1e6:.2f} million/s on "
        "one core (median "
        f"{rate['per_second_median'] / 1e6:.2f}; at least "
        f"{LIMITS['candidates_per_second'] / 1e6:.0f})"
    )
    print(
        f"best layout: {answer['layout']} with {answer['concurrency']} requests in flight, "
        f"{answer['tokens_per_second_per_gpu']:.0f} tokens/s/GPU, TTFT "
        f"{answer['ttft_s'] * 1e3:.0f} ms, "
        f"TPOT {answer['tpot_s'] * 1e3:.1f} ms; {answer['best_s'] * 1e3:.0f} ms of processor time "
        "(median "
        f"{answer['median_s'] * 1e3:.0f}; at most 300), as a command {answer['process_s']:.2f} s "
        "(at most 1.5)"
    )
    if "peer" in report:
        print(f"aiconfigurator: {report['peer']}")
    if "rows" in report:
        print(peer_rows.format_table(report["rows"]))


if __name__ == "__main__":
    main()
