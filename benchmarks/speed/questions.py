"""What `benchmarks.speed.against` times inside a process: `python questions.py QUESTIONS REPEATS`,
with a tree on PYTHONPATH.

QUESTIONS: a JSON file, the same for every tree. Prints least processor seconds by question. Uses
only what old trees have too.
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
except ImportError:  # a tree without it

    def forget_all() -> None:
        """Nothing is shared between calls."""


def calls(questions: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each question's name and the call that answers it once."""
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


def seconds(call: Callable[[], object], *, repeats: int) -> float:
    """Return the least processor time of a call, once warm and without the collector of garbage."""
    call()
    times: list[float] = []
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        forget_all()  # each layout counts as seen for the first time
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    gc.enable()
    return min(times)


if __name__ == "__main__":
    questions = json.loads(Path(sys.argv[1]).read_text())
    hp_tool.recommend(questions["warm"])  # so that the heap is kept (training.rank.keep_heap)
    repeats = int(sys.argv[2])
    print(json.dumps({name: seconds(call, repeats=repeats) for name, call in calls(questions)}))
