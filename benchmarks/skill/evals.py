"""Read the evals of the agent skill, and compare answers of its tools with the evals' facts."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from service.agents import SKILL

EVALS = SKILL.parent / "evals/evals.json"
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "contains": lambda found, expected: expected in str(found),
}


@dataclass(frozen=True)
class Eval:
    """One task for an agent.

    `calls`, `facts` and `answer_matches` are extensions of the common format.
    """

    id: int
    prompt: str
    expected_output: str
    assertions: list[str]
    """Statements that a reader checks in an agent's answer."""
    answer_matches: list[str]
    """Regular expressions that an answer must match."""
    calls: list[dict[str, Any]]
    """Calls that answer the prompt: `tool`, `arguments`, and `facts` of the answer
    ([path, comparison, value]) or `refused`, a part of the error.
    """
    files: list[str]

    def unmatched(self, answer: str) -> list[str]:
        """Return the expressions that an answer does not match."""
        return [each for each in self.answer_matches if re.search(each, answer) is None]


def read_evals() -> list[Eval]:
    """Return all evals."""
    return [Eval(**each) for each in json.loads(EVALS.read_text(encoding="utf-8"))["evals"]]


def broken_facts(answer: Any, facts: list[list[Any]]) -> list[str]:
    """Return the facts that a tool's answer contradicts, with the answer's value."""
    broken = []
    for path, comparison, expected in facts:
        found = answer
        try:
            for key in path.split("."):
                found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, TypeError):
            broken.append(f"{path}: missing")
            continue
        if not COMPARISONS[comparison](found, expected):
            broken.append(f"{path}: {found!r}, not {comparison} {expected!r}")
    return broken
