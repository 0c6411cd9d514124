"""Script that `benchmarks.speed.against` runs for each tree.

`python questions.py QUESTIONS REPEATS`, with the tree on PYTHONPATH.

QUESTIONS is a JSON file, the same for every tree. The script prints the least processor time of
each question in seconds. It uses only functions that old trees have, too.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hp_tool
from hp_tool.questions.answers import answer_lines
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from hp_tool.questions.training.problem import resolve_training
from hp_tool.space import default_axes, legal_chunks

try:
    from hp_tool.cost.shared import forget_all
except ImportError:  # Trees without this function share nothing between calls.

    def forget_all() -> None: ...


def iterate_calls(questions: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each question and a call that answers it once."""
    for name, layouts in questions.get("estimates", {}).items():
        queries = [parse_query(layout) for layout in layouts]
        yield (
            f"estimates, {name}",
            lambda queries=queries: [estimate(query=one, with_fixes=False) for one in queries],
        )
    for name, layouts in questions.get("lines", {}).items():
        lines = [json.dumps(layout).encode() for layout in layouts]
        yield (
            f"lines, {name}",
            lambda lines=lines: [answer_lines([one], task="estimate", top=1) for one in lines],
        )
    for name, file in questions.get("export", {}).items():
        yield f"export, {name}", lambda file=file: hp_tool.export(Path(file), format="megatron-lm")
    for name, query in questions.get("serving", {}).items():
        yield f"serving, {name}", lambda query=query: hp_tool.recommend(query)
    for name, space in questions.get("candidates", {}).items():
        problem = resolve_training(query := parse_query(space))
        chunks = [
            chunk.candidates
            for chunk in legal_chunks(
                axes=default_axes(query=query.parallel, case=problem), case=problem
            )
        ]
        chunks = [chunk for chunk in chunks if len(chunk)]
        yield (
            f"candidates, {name}",
            lambda p=problem, chunks=chunks: [p.costs(chunk) for chunk in chunks],
        )


def least_cpu_seconds(call: Callable[[], object], *, repeats: int) -> float:
    """Return the least processor time of a call after a first one, without the garbage
    collector.
    """
    call()
    times: list[float] = []
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        forget_all()  # results of earlier calls are not reused
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    gc.enable()
    return min(times)


if __name__ == "__main__":
    questions = json.loads(Path(sys.argv[1]).read_text())
    hp_tool.recommend(questions["warm"])  # calls keep_heap, as every ranking does
    repeats = int(sys.argv[2])
    times = {
        name: least_cpu_seconds(call, repeats=repeats) for name, call in iterate_calls(questions)
    }
    print(json.dumps(times))
