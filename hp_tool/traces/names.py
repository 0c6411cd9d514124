"""What recorded names are: `data/kernels.yaml`, compiled, with a memory of names that came
before.
"""

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
"""Characters of a name that are looked at: templates go on for thousands."""
MAX_STEP_NAME = 30
REMEMBERED = 50_000
"""Names whose class is kept; a training has hundreds."""
Rules = tuple[tuple[re.Pattern[str], Any], ...]


@functools.cache
def table() -> dict[str, Any]:
    """The file's sections."""
    return documents.read(TABLE)


def rules(section: str, key: str, values: Sequence[str]) -> Rules:
    """A section's patterns, each with the index among `values` of what it stands for."""
    return tuple(
        (re.compile(each["pattern"]), values.index(each[key])) for each in table()[section]
    )


class Names:
    """The classes of names; one object for one trace."""

    def __init__(self) -> None:
        self._kernels = rules("kernels", "kind", KINDS)
        self._operations = rules("collectives", "operation", COLLECTIVES)
        self._groups = rules("groups", "part", COMMUNICATION)
        self._workloads = rules("workloads", "workload", WORKLOADS)
        self._phases = rules("phases", "phase", PHASES)
        self._operators = tuple((re.compile(each["pattern"]), 0) for each in table()["operators"])
        self._step = re.compile(table()["steps"]["pattern"], re.IGNORECASE)
        self._known: dict[tuple[int, str], int] = {}

    def kernel(self, name: str) -> int:
        """Index in KINDS; `unknown` if no rule recognizes the name."""
        kind = self._first(0, self._kernels, name)
        return KINDS.index("unknown") if kind < 0 else kind

    def workload(self, name: str) -> str | None:
        """Return which of WORKLOADS alone has a kernel or span of this name; None if any may have
        it.
        """
        workload = self._first(5, self._workloads, name)
        return None if workload < 0 else WORKLOADS[workload]

    def operator(self, name: str) -> bool:
        """Whether an operator of a CPU process is work of its own."""
        return self._first(1, self._operators, name) == 0

    def operation(self, name: str) -> int:
        """Index in COLLECTIVES."""
        operation = self._first(2, self._operations, name, lower=True)
        return COLLECTIVES.index("other") if operation < 0 else operation

    def phase(self, name: str) -> int:
        """Index in PHASES; -1: no phase."""
        return self._first(3, self._phases, name)

    def group(self, description: str) -> str | None:
        """Return the part whose group has this description; None if no rule knows it."""
        part = self._first(4, self._groups, description)
        return None if part < 0 else COMMUNICATION[part]

    def step(self, name: str) -> int | None:
        """The number of a marked step; None: no step's mark."""
        match = self._step.search(name) if len(name) < MAX_STEP_NAME else None
        return None if match is None else int(match[1])

    def _first(self, place: int, patterns: Rules, name: str, *, lower: bool = False) -> int:
        name = name[:MAX_NAME]
        key = (place, name)
        known = self._known.get(key)
        if known is not None:
            return known
        text = name.lower() if lower else name
        value = next((value for pattern, value in patterns if pattern.search(text)), -1)
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[key] = value
        return value


def unnamed_part(operation: str, *, flat: bool, groups: Sequence[Group]) -> str:
    """The part of a collective whose group was not recorded, by its operation and the groups that
    exist.
    """
    orders = table()["unnamed"]
    order: list[str] = orders.get(operation) or orders["flat" if flat else "shaped"]
    large = {group.part for group in groups if len(group.ranks) > 1}
    return next((part for part in order if part in large), order[0])
