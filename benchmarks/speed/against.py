"""`python -m benchmarks.speed.against COMMIT [--only QUESTION ...] [--rounds 3] [--json]`: compare
the processor time of this tree with that of a commit.

Both trees answer the same questions alternately, each round in new processes, so that a busy
machine slows both. A ratio below 1 means that this tree is faster.
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
from benchmarks.speed.measure import HP_TOOL, time_command
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
    "MoE": workloads.MOE_QUERY,
    "latent attention": workloads.MIXED_QUERY,
    "fine-tune": FINE_TUNE_QUERY,
}
SMALL_SPACE: dict[str, Any] = {
    "expert_parallel_size": 8,
    "micro_batch_size": [1, 2],
    "moe_token_dispatcher_type": "alltoall",
}
"""Axes that limit a space to about a second of processor time."""
README_QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
}
COMMAND_QUERIES = {"recommend": workloads.EXPERT_QUERY, "README's first": README_QUERY}
"""Queries for which the whole `hp-tool recommend` command is timed."""
LAYOUTS_PER_MODEL = 250
"""Number of layouts per model whose estimates are timed one by one."""
LINES_PER_MODEL = 50
"""Number of these layouts that are also timed as JSON lines."""
QUESTIONS = ("estimates", "lines", "export", "serving", "candidates", "process")


def build_questions(only: Sequence[str]) -> dict[str, Any]:
    """Return the input of `questions.py`: the variants of each question by name.

    The result is empty if only whole commands are timed, which need no import that old trees lack.
    """
    drawn = (
        {name: draw_layouts(query) for name, query in MODELS.items()}
        if {"estimates", "lines"} & {*only}
        else {}
    )
    variants = {
        "estimates": drawn,
        "lines": {name: queries[:LINES_PER_MODEL] for name, queries in drawn.items()},
        "export": {"dense": str(REPOSITORY / "examples" / "gpt3-175b.yaml")},
        "serving": {"dense": serving.QUESTION},
        "candidates": {
            "dense": workloads.QUERY | {"parallel": workloads.EVERYTHING},
            "MoE": workloads.MOE_QUERY | {"parallel": SMALL_SPACE},
            "both kinds": workloads.MIXED_QUERY | {"parallel": SMALL_SPACE},
        },
    }
    asked = {name: variants[name] for name in only if name in variants}
    return {"warm": SMALL_QUERY} | asked if asked else {}


def draw_layouts(query: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the query with each of LAYOUTS_PER_MODEL legal layouts of its space."""
    parsed = parse_query(
        query | {"parallel": SMALL_SPACE}
        if query in (workloads.MOE_QUERY, workloads.MIXED_QUERY)
        else query
    )
    candidates = Candidates.concatenate(workloads.legal_space(parsed)[1])
    return [
        query_mapping(one)
        for one in workloads.draw_queries(parsed, candidates, count=LAYOUTS_PER_MODEL)
    ]


def time_tree(
    tree: Path, file: Path, commands: Mapping[str, Path], *, repeats: int
) -> dict[str, float]:
    """Return the processor seconds of the questions in `file`, and of `hp-tool recommend` for each
    query file in `commands`, in one tree.
    """
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    script = Path(__file__).with_name("questions.py")
    times: dict[str, float] = {}
    if json.loads(file.read_text()):
        questions = (sys.executable, str(script), str(file), str(repeats))
        times = json.loads(time_command(questions, cwd=tree, env=environment).stdout)
    for name, query in commands.items():
        command = (*HP_TOOL, "recommend", str(query))
        times[name] = time_command(command, cwd=tree, env=environment).cpu_s
    return times


def compare_trees(
    commit: str, *, rounds: int, repeats: int, only: Sequence[str] = QUESTIONS
) -> list[dict[str, Any]]:
    """Return the best and median times of each question in both trees, and their ratios."""
    with tempfile.TemporaryDirectory(prefix="hp-speed-") as folder, ExitStack() as stack:
        tree, file = (Path(folder) / name for name in ("tree", "questions.json"))
        file.write_text(json.dumps(build_questions(only)))
        commands = (
            {f"process, {name}": Path(folder) / f"{name}.json" for name in COMMAND_QUERIES}
            if "process" in only
            else {}
        )
        for path in commands.values():
            path.write_text(json.dumps(COMMAND_QUERIES[path.stem]))
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
            [time_tree(each, file, commands, repeats=repeats) for each in trees]
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


def format_table(rows: list[dict[str, Any]]) -> str:
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
        help="calls in each process; the least time counts",
    )
    parser.add_argument(
        "--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="questions to ask"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    rows = compare_trees(
        arguments.commit, rounds=arguments.rounds, repeats=arguments.repeats, only=arguments.only
    )
    print(json.dumps({"questions": rows}, indent=2) if arguments.json else format_table(rows))


if __name__ == "__main__":
    main()
