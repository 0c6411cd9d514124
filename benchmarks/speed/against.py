"""`python -m benchmarks.speed.against COMMIT [--only QUESTION ...] [--rounds 3] [--json]`:
processor time over a commit's.

Both answer the same questions in turns, each round in fresh processes, so that a busy machine slows
both. Below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from compileall import compile_dir
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.speed import serving, workloads
from hp_tool.cost.candidates import Candidates
from hp_tool.questions.schema import parse_query, query_mapping

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
    "training": {
        "sequence_length": 4096,
        "global_batch_size": 256,
        "task": "lora",
        "lora": {"rank": 16},
    },
}
MODELS = {
    "dense, small": SMALL_QUERY,
    "dense, large": workloads.EXPERT_QUERY,
    "mixture": workloads.MOE_QUERY,
    "latent attention": workloads.MIXED_QUERY,
    "fine-tune": FINE_TUNE_QUERY,
}
NARROW: dict[str, Any] = {
    "expert_parallel_size": 8,
    "micro_batch_size": [1, 2],
    "moe_token_dispatcher_type": "alltoall",
}
"""Axes of spaces that take a second."""
README_QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
}
PROCESSES = {"recommend": workloads.EXPERT_QUERY, "README's first": README_QUERY}
"""Questions whose whole command is timed."""
LAYOUTS = 250
"""Layouts drawn of each model whose estimates are timed alone."""
LINES = 50
"""Of these, as lines of a batch."""
QUESTIONS = ("estimates", "lines", "export", "serving", "candidates", "process")


def questions(only: Sequence[str]) -> dict[str, Any]:
    """Return what `benchmarks.speed.questions` is given: of each question its variants by name.

    Empty where only whole commands are timed: these need no import that old trees lack.
    """
    drawn = (
        {name: layouts(query) for name, query in MODELS.items()}
        if {"estimates", "lines"} & {*only}
        else {}
    )
    variants = {
        "estimates": drawn,
        "lines": {name: queries[:LINES] for name, queries in drawn.items()},
        "export": {"dense": str(REPOSITORY / "examples" / "gpt3-175b.yaml")},
        "serving": {"dense": serving.QUESTION},
        "candidates": {
            "dense": workloads.QUERY | {"parallel": workloads.EVERYTHING},
            "mixture": workloads.MOE_QUERY | {"parallel": NARROW},
            "both kinds": workloads.MIXED_QUERY | {"parallel": NARROW},
        },
    }
    asked = {name: variants[name] for name in only if name in variants}
    return {"warm": SMALL_QUERY} | asked if asked else {}


def layouts(query: dict[str, Any]) -> list[dict[str, Any]]:
    """Return queries of LAYOUTS different legal configurations of a query's space."""
    parsed = parse_query(
        query | {"parallel": NARROW}
        if query in (workloads.MOE_QUERY, workloads.MIXED_QUERY)
        else query
    )
    candidates = Candidates.concatenate(workloads.legal_space(parsed)[1])
    return [query_mapping(one) for one in workloads.drawn(parsed, candidates, count=LAYOUTS)]


def times_of(
    tree: Path, file: Path, processes: Mapping[str, Path], *, repeats: int
) -> dict[str, float]:
    """Return processor seconds of every question in a tree; of `processes` those of the whole
    command.
    """
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    script = Path(__file__).with_name("questions.py")
    times: dict[str, float] = {}
    if json.loads(file.read_text()):
        command = [sys.executable, script, file, str(repeats)]
        done = subprocess.run(
            command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE
        )
        times = json.loads(done.stdout)
    for name, query in processes.items():
        command = [
            sys.executable,
            "-c",
            "from hp_tool.cli.main import main; main()",
            "recommend",
            query,
        ]
        before = os.times()
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        times[name] = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    return times


def compared(
    commit: str, *, rounds: int, repeats: int, only: Sequence[str] = QUESTIONS
) -> list[dict[str, Any]]:
    """Return for each question best and median of both trees, and the ratio of the bests."""
    with tempfile.TemporaryDirectory(prefix="hp-speed-") as folder, ExitStack() as stack:
        tree, file = (Path(folder) / name for name in ("tree", "questions.json"))
        file.write_text(json.dumps(questions(only)))
        processes = (
            {f"process, {name}": Path(folder) / f"{name}.json" for name in PROCESSES}
            if "process" in only
            else {}
        )
        for path in processes.values():
            path.write_text(json.dumps(PROCESSES[path.stem]))
        add = ("git", "worktree", "add", "--quiet", "--detach", str(tree), commit)
        subprocess.run(add, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        stack.callback(
            subprocess.run,
            ("git", "worktree", "remove", "--force", str(tree)),
            cwd=REPOSITORY,
            check=True,
        )
        trees = (tree, REPOSITORY)
        for each in trees:
            compile_dir(each / "hp_tool", quiet=1)
        times = [
            [times_of(each, file, processes, repeats=repeats) for each in trees]
            for _ in range(rounds)
        ]
    rows = []
    for name in times[0][0]:
        before, now = ([pair[side][name] for pair in times] for side in (0, 1))
        rows.append(
            {
                "question": name,
                "before_best_s": min(before),
                "before_median_s": statistics.median(before),
                "now_best_s": min(now),
                "now_median_s": statistics.median(now),
                "ratio": min(now) / min(before),
                "median_of_ratios": statistics.median(
                    b / a for a, b in zip(before, now, strict=True)
                ),
            }
        )
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    heads = ("before", "(median)", "now", "(median)")
    lines = [
        f"{'milliseconds of processor time':36}{''.join(f'{head:>10}' for head in heads)}{'ratio':>8}{'(median)':>10}"  # noqa: E501
    ]
    for row in rows:
        times = "".join(
            f"{1e3 * row[key]:10.1f}"
            for key in ("before_best_s", "before_median_s", "now_best_s", "now_median_s")
        )
        lines.append(
            f"{row['question']:36}{times}{row['ratio']:8.2f}{row['median_of_ratios']:10.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.against", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="calls in each process, of which the least time counts",
    )
    parser.add_argument(
        "--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="questions to ask"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    rows = compared(
        arguments.commit, rounds=arguments.rounds, repeats=arguments.repeats, only=arguments.only
    )
    print(json.dumps({"questions": rows}, indent=2) if arguments.json else as_text(rows))


if __name__ == "__main__":
    main()
