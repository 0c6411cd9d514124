"""`python -m benchmarks.speed.against COMMIT [--rounds 5] [--json]`: processor time of this tree over that of a commit.

Both answer the same questions in turns, each round in fresh processes, so that a busy machine slows both. Below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.speed import serving, workloads
from hp_tool.cost.candidates import Candidates
from hp_tool.queries.schema import parse_query, query_mapping

REPOSITORY = Path(__file__).parents[2]
SMALL_QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 256},
}
FINE_TUNE_QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 4096, "global_batch_size": 256, "task": "lora", "lora": {"rank": 16}},
}
MODELS = {
    "dense, small": SMALL_QUERY,
    "dense, large": workloads.EXPERT_QUERY,
    "mixture": workloads.MOE_QUERY,
    "latent attention": workloads.MIXED_QUERY,
    "fine-tune": FINE_TUNE_QUERY,
}
NARROW: dict[str, Any] = {"expert_parallel_size": 8, "micro_batch_size": [1, 2], "moe_token_dispatcher_type": "alltoall"}
"""Axes of spaces that take a second."""
LAYOUTS = 250
"""Layouts drawn of each model."""
PROCESS = "recommend, as a process"


def questions() -> dict[str, Any]:
    """Return what `benchmarks.speed.questions` is given."""
    return {
        "warm": SMALL_QUERY,
        "layouts": {name: layouts(query) for name, query in MODELS.items()},
        "export": str(REPOSITORY / "examples" / "gpt3-175b.yaml"),
        "serving": serving.QUESTION,
        "spaces": {
            "dense": workloads.QUERY | {"parallel": workloads.EVERYTHING},
            "mixture": workloads.MOE_QUERY | {"parallel": NARROW},
            "both kinds": workloads.MIXED_QUERY | {"parallel": NARROW},
        },
    }


def layouts(query: dict[str, Any]) -> list[dict[str, Any]]:
    """Return queries of LAYOUTS different legal configurations of a query's space."""
    parsed = parse_query(query | {"parallel": NARROW} if query in (workloads.MOE_QUERY, workloads.MIXED_QUERY) else query)
    candidates = Candidates.concatenate(workloads.legal_space(parsed)[1])
    return [query_mapping(one) for one in workloads.drawn(parsed, candidates, count=LAYOUTS)]


def times_of(tree: Path, file: Path, query: Path) -> dict[str, float]:
    """Return processor seconds of every question in a tree."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    script = Path(__file__).with_name("questions.py")
    done = subprocess.run([sys.executable, script, file], cwd=tree, env=environment, check=True, stdout=subprocess.PIPE)
    times: dict[str, float] = json.loads(done.stdout)
    command = [sys.executable, "-c", "from hp_tool.cli.main import main; main()", "recommend", query]
    before = os.times()
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return times | {PROCESS: after.children_user + after.children_system - before.children_user - before.children_system}


def compared(commit: str, *, rounds: int) -> list[dict[str, Any]]:
    """Return for each question best and median of both trees, and the ratio of the bests."""
    with tempfile.TemporaryDirectory(prefix="hp-speed-") as folder, ExitStack() as stack:
        tree, file, query = (Path(folder) / name for name in ("tree", "questions.json", "query.json"))
        file.write_text(json.dumps(questions()))
        query.write_text(json.dumps(workloads.EXPERT_QUERY))
        add = ("git", "worktree", "add", "--quiet", "--detach", str(tree), commit)
        subprocess.run(add, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        stack.callback(subprocess.run, ("git", "worktree", "remove", "--force", str(tree)), cwd=REPOSITORY, check=True)
        trees = (tree, REPOSITORY)
        for each in trees:  # compiles what is imported
            times_of(each, file, query)
        times = [[times_of(each, file, query) for each in trees] for _ in range(rounds)]
    rows = []
    for name in times[0][0]:
        before, now = ([pair[side][name] for pair in times] for side in (0, 1))
        rows.append({
            "question": name, "before_best_s": min(before), "before_median_s": statistics.median(before),
            "now_best_s": min(now), "now_median_s": statistics.median(now), "ratio": min(now) / min(before),
            "median_of_ratios": statistics.median(b / a for a, b in zip(before, now, strict=True)),
        })  # fmt: skip
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    heads = ("before", "(median)", "now", "(median)")
    lines = [f"{'milliseconds of processor time':36}{''.join(f'{head:>10}' for head in heads)}{'ratio':>8}{'(median)':>10}"]
    for row in rows:
        times = "".join(f"{1e3 * row[key]:10.1f}" for key in ("before_best_s", "before_median_s", "now_best_s", "now_median_s"))
        lines.append(f"{row['question']:36}{times}{row['ratio']:8.2f}{row['median_of_ratios']:10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.against", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    rows = compared(arguments.commit, rounds=arguments.rounds)
    print(json.dumps({"questions": rows}, indent=2) if arguments.json else as_text(rows))


if __name__ == "__main__":
    main()
