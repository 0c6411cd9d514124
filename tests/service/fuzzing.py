"""Mutated query files through every door.

Each is answered as a batch line is, every tenth as a file of the command line, and every twentieth
over HTTP besides. What counts as a fault: an internal error, a 5xx, an exception that is none of
ours, an answer that is no JSON or comes late.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from hp_tool.cli.queries import read_query as read_file
from hp_tool.errors import HpToolError
from hp_tool.questions.answers import answer_estimate, answer_lines
from hp_tool.questions.schema import to_json
from hp_tool.store import open_store
from service.api.bodies import read_query
from service.app import create_app
from service.settings import Settings
from tests.service.mutations import mutated

LIMIT_S = {"estimate": 2.0, "recommend": 30.0}
"""CPU seconds of one answer: those of a recommendation are for a space of millions."""
RECOMMEND_EVERY, FILE_EVERY, HTTP_EVERY = 25, 10, 20
OURS = frozenset({200, 413, 422})


def fuzz(*, queries: int, seed: int = 0) -> dict[str, Any]:
    """{queries, outcomes: {door: {outcome: count}}, slowest_s, faults: [{door, why, query}]}; the
    first twenty faults.
    """
    outcomes: dict[str, Counter[str]] = {}
    faults: list[dict[str, str]] = []
    slowest = dict.fromkeys(LIMIT_S, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        doors = _doors(Path(folder))
        for number, query in enumerate(mutated(count=queries, seed=seed)):
            task = "recommend" if number % RECOMMEND_EVERY == 0 else "estimate"
            for name, (every, door) in doors.items():
                if number % every:
                    continue
                began = time.process_time()
                try:
                    outcome, fault = door(query, task)
                except Exception as error:
                    outcome, fault = "exception", f"{type(error).__name__}: {error}"
                took = time.process_time() - began
                slowest[task] = max(slowest[task], took)
                if took > LIMIT_S[task]:
                    fault = fault or f"took {took:.1f} s"
                outcomes.setdefault(name, Counter())[outcome] += 1
                if fault:
                    faults.append(
                        {
                            "door": name,
                            "task": task,
                            "why": fault[:300],
                            "query": query.decode("utf-8", "replace")[:2000],
                        }
                    )
        doors["http"][1].close()  # type: ignore[attr-defined]
    told = {name: dict(counts.most_common()) for name, counts in outcomes.items()}
    return {
        "queries": queries,
        "outcomes": told,
        "slowest_s": slowest,
        "faulty": len(faults),
        "faults": faults[:20],
    }


Door = Callable[[bytes, str], tuple[str, str | None]]


def _doors(folder: Path) -> dict[str, tuple[int, Door]]:
    """By name: of how many queries each is asked one, and how it answers (outcome, fault)."""
    file = folder / "query.yaml"

    def line(query: bytes, task: str) -> tuple[str, str | None]:
        read = partial(read_query, find=lambda kind, name: None)
        answer = answer_lines([query], task=task, top=3, read=read)[0]  # type: ignore[arg-type]
        return _judged(answer)

    def command(query: bytes, task: str) -> tuple[str, str | None]:
        file.write_bytes(query)
        try:
            return _judged(to_json(answer_estimate(read_file(str(file), {}, None))))
        except HpToolError as error:
            return error.code, "an internal error" if error.code == "internal" else None

    return {"line": (1, line), "file": (FILE_EVERY, command), "http": (HTTP_EVERY, Http(folder))}


class Http:
    """The service in this process, asked at the three doors by turns."""

    def __init__(self, folder: Path) -> None:
        self._store = open_store(f"sqlite:///{folder / 'fuzz.sqlite3'}")
        app = create_app(Settings(), store=self._store)
        self._client = TestClient(
            app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False
        )
        self._asked = 0

    def __call__(self, query: bytes, task: str) -> tuple[str, str | None]:
        self._asked += 1
        path = "/v1/recommendations?top=3" if task == "recommend" else "/v1/estimates"
        if self._asked % 3 == 0:
            answer = self._client.post(
                f"/v1/batch?task={task}&top=3", content=query.replace(b"\n", b" ")
            )
            judged = [_judged(text) for text in answer.text.splitlines()]
            fault = next((fault for _, fault in judged if fault), None)
        else:
            answer = self._client.post(path, content=query)
            answer.json()
            fault = None
        if answer.status_code not in OURS:
            fault = f"status {answer.status_code}: {answer.text[:200]}"
        return str(answer.status_code), fault

    def close(self) -> None:
        self._client.close()
        self._store.close()


def _judged(text: str) -> tuple[str, str | None]:
    """An answer's status or its error's code, and what is wrong with it."""
    answer = json.loads(text, parse_constant=_refuse)
    if answer["status"] == "ok":
        return "ok", None
    code = answer["error"]["code"]
    return code, f"an internal error: {answer['error']['message']}" if code == "internal" else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
