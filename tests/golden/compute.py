"""The answers to all golden queries, through `hp_tool.estimate`, `hp_tool.recommend` and the
`hp-tool` command.

This file imports nothing else of the repository, so that it runs beside any version of hp_tool:

    PYTHONPATH=TREE python tests/golden/compute.py > answers.jsonl
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

QUERIES = Path(__file__).parent / "queries"
WORDS = frozenset(
    {
        "provenance",
        "message",
        "source",
        "change",
        "query",
        "seconds",
        "version",
        "id",
        "status",
        "name",
    }
)
"""Keys of an answer that predict nothing: words for people, bookkeeping, the clock."""
SHOWN = 2
"""Rows of a ranking, and of a front."""
NEIGHBOURS = [
    {"micro_batch_size": size, "recompute": recompute}
    for recompute in (
        "none",
        "selective",
        "full",
        {"granularity": "full", "method": "block", "num_layers": 1},
    )
    for size in (1, 2, 4)
]
"""Laid over a query's `parallel`, these stand beside it in a batch: its own configuration is then a
row of an array.
"""


def answers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each answer with its key, such as `alone/train-017`."""
    with _clean_environment():
        yield from _alone()
        yield from _batch()
        yield from _grids()
        yield from _fits()


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a file of queries."""
    return [json.loads(line) for line in (QUERIES / name).read_text().splitlines()]


def _alone() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each query as the only one: plain numbers, and what would fix an infeasible one."""
    import hp_tool

    for query in read("training.jsonl") + read("serving.jsonl"):
        yield f"alone/{query['id']}", predicted(asdict(hp_tool.estimate(query)))


def _batch() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each query among others of its kind: rows of arrays."""
    lines = []
    for query in read("training.jsonl"):
        lines.append(query)
        lines.extend(
            query | {"id": "", "parallel": query["parallel"] | other} for other in NEIGHBOURS[::4]
        )
    for answer in _command_batch(lines + read("serving.jsonl")):
        if answer["id"]:
            familiarity = (answer.get("estimate") or {}).get("familiarity") or {}
            if "class" in familiarity:  # which Python calls class_
                familiarity["class_"] = familiarity.pop("class")
            yield f"batch/{answer['id']}", predicted(answer)


def _grids() -> Iterator[tuple[str, dict[str, Any]]]:
    """The best rows of small spaces, or what comes nearest, and what ruled the others out."""
    import hp_tool

    for row in read("grids.jsonl"):
        answer = asdict(hp_tool.recommend(row["query"], top=SHOWN, pareto=row.get("pareto")))
        answer |= {
            front: answer[front][:SHOWN]
            for front in ("pareto", "throughput_front")
            if answer[front]
        }
        yield f"grid/{row['query']['id']}", predicted(answer)


def _fits() -> Iterator[tuple[str, dict[str, Any]]]:
    """What each set of measurements teaches, and what predictions become with it."""
    for evidence in sorted(QUERIES.glob("measured/*.jsonl")):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HP_DATABASE_URL"] = f"sqlite:///{folder}/fits.sqlite3"
            made = json.loads(_command("calibrate", "--measurements", str(evidence), "--json"))[
                "calibrations"
            ]
            for fit in made:
                record = fit["record"]
                name = (
                    f"fit/{evidence.stem}/{record['framework']}/{record['model_family'] or 'all'}"
                )
                yield name, {"summary": record["payload"]["summary"], "accuracy": fit["accuracy"]}
            rows = [json.loads(line) for line in evidence.read_text().splitlines()]
            asked = [
                row["query"] | {"id": str(n), "parallel": row["parallel"]}
                for n, row in enumerate(rows)
            ]
            asked += [
                query | {"id": f"{query['id']}+{n}", "parallel": query["parallel"] | other}
                for query in asked[:1]
                for n, other in enumerate(NEIGHBOURS)
            ]
            for answer in _command_batch(asked):
                corrected = {name: answer.get(name) for name in ("calibrated_estimate", "error")}
                yield f"corrected/{evidence.stem}/{answer['id']}", predicted(corrected)
            os.environ.pop("HP_DATABASE_URL")


def predicted(answer: Any) -> Any:
    """The numbers, verdicts and configurations of an answer, without words and without what is None
    or empty.
    """
    if isinstance(answer, dict):
        kept = {key: predicted(value) for key, value in answer.items() if key not in WORDS}
        return {key: value for key, value in kept.items() if value not in (None, {}, [])}
    return [predicted(value) for value in answer] if isinstance(answer, list | tuple) else answer


def _command_batch(queries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(query) + "\n" for query in queries)
        file.flush()
        return [json.loads(line) for line in _command("batch", file.name).splitlines()]


def _command(*arguments: str) -> str:
    """What `hp-tool ARGUMENTS` prints, run in this process."""
    from hp_tool.cli.main import main

    stdout, kept = io.TextIOWrapper(io.BytesIO()), sys.argv
    sys.argv = ["hp-tool", *arguments]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()):
            main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"hp-tool {' '.join(arguments)} ended with {end.code}") from None
    finally:
        sys.argv = kept
    stdout.seek(0)
    return stdout.read()


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """Without the user's own catalogue, database and server."""
    kept = copy.copy(dict(os.environ))
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in os.environ if name.startswith("HP_")]:
            del os.environ[name]
        os.environ |= {"XDG_DATA_HOME": folder, "XDG_CONFIG_HOME": folder}
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(kept)


if __name__ == "__main__":
    for key, answer in answers():
        print(json.dumps({"key": key, "answer": answer}, separators=(",", ":")))
