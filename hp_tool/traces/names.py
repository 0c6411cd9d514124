"""Classify recorded names by the rules in `data/kernels.yaml`, with a cache."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hp_tool.catalog import documents
from hp_tool.domain.parts import COMMUNICATION
from hp_tool.traces.timeline.events import COLLECTIVES, KINDS, PHASES, WORKLOADS, Group

TABLE = Path(__file__).parent / "data" / "kernels.yaml"
MAX_NAME = 400
"""Number of characters of a name that are matched. Names of C++ templates can have thousands."""
MAX_STEP_NAME = 30
CACHE_SIZE = 50_000
"""Maximum number of cached names. A training job has hundreds."""
Rules = tuple[tuple[re.Pattern[str], Any], ...]


@functools.cache
def table() -> dict[str, Any]:
    """Return the sections of the rules file."""
    return documents.read(TABLE)


def compile_rules(section: str, key: str, values: Sequence[str]) -> Rules:
    """Compile a section's patterns. Each is paired with the index of its class in `values`."""
    return tuple(
        (re.compile(rule["pattern"]), values.index(rule[key])) for rule in table()[section]
    )


class Names:
    """Classify names. Use one object per trace."""

    def __init__(self) -> None:
        self._kernels = compile_rules("kernels", "kind", KINDS)
        self._operations = compile_rules("collectives", "operation", COLLECTIVES)
        self._groups = compile_rules("groups", "part", COMMUNICATION)
        self._workloads = compile_rules("workloads", "workload", WORKLOADS)
        self._phases = compile_rules("phases", "phase", PHASES)
        self._operators = tuple((re.compile(rule["pattern"]), 0) for rule in table()["operators"])
        self._step = re.compile(table()["steps"]["pattern"], re.IGNORECASE)
        self._known: dict[tuple[int, str], int] = {}

    def kernel(self, name: str) -> int:
        """Return the index of the kernel's kind in KINDS; `unknown` if no rule matches."""
        kind = self._first(0, self._kernels, name)
        return KINDS.index("unknown") if kind < 0 else kind

    def workload(self, name: str) -> str | None:
        """Return the only workload in which this name occurs; None if it is not specific to one."""
        workload = self._first(5, self._workloads, name)
        return None if workload < 0 else WORKLOADS[workload]

    def operator(self, name: str) -> bool:
        """Return True if this CPU operator does work itself instead of calling other operators."""
        return self._first(1, self._operators, name) == 0

    def operation(self, name: str) -> int:
        """Return the index of the collective in COLLECTIVES."""
        operation = self._first(2, self._operations, name, lower=True)
        return COLLECTIVES.index("other") if operation < 0 else operation

    def phase(self, name: str) -> int:
        """Return the index of the phase in PHASES; -1 if none."""
        return self._first(3, self._phases, name)

    def group(self, description: str) -> str | None:
        """Return the part whose process group has this description; None if no rule matches."""
        part = self._first(4, self._groups, description)
        return None if part < 0 else COMMUNICATION[part]

    def step(self, name: str) -> int | None:
        """Return the number in a step marker; None for other names."""
        match = self._step.search(name) if len(name) < MAX_STEP_NAME else None
        return None if match is None else int(match[1])

    def _first(self, place: int, patterns: Rules, name: str, *, lower: bool = False) -> int:
        name = name[:MAX_NAME]
        key = (place, name)
        cached = self._known.get(key)
        if cached is not None:
            return cached
        text = name.lower() if lower else name
        value = next((value for pattern, value in patterns if pattern.search(text)), -1)
        if len(self._known) >= CACHE_SIZE:
            self._known.clear()
        self._known[key] = value
        return value


def unnamed_part(operation: str, *, flat: bool, groups: Sequence[Group]) -> str:
    """Return the most likely part of a collective whose process group was not recorded."""
    orders = table()["unnamed"]
    order: list[str] = orders.get(operation) or orders["flat" if flat else "shaped"]
    large = {group.part for group in groups if len(group.ranks) > 1}
    return next((part for part in order if part in large), order[0])
