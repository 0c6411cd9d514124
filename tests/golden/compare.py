"""Differences between golden answers: of two versions on one machine, or of a version and the
stored answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "answers"
TOLERANCES = {"fit": 1e-9, "corrected": 1e-9}
"""Relative, by family of answers; fits search for their hyperparameters."""
TOLERANCE = 1e-12
"""Relative, of what is only computed: processors and releases of NumPy round differently."""
ABSENT = "absent"
ROUNDED_AS_A_WHOLE = {"parts_s": None, "accuracy": 1.0}
"""Mappings whose values are differences of larger numbers and carry their rounding: the parts of a
sum, held to the largest one (None), and medians of |predicted / measured - 1|.
"""

Answers = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that is not what it was."""

    place: str
    before: Any
    after: Any
    scale: float = 0.0

    @property
    def share(self) -> float:
        """Relative to the larger of two numbers, or to `scale` where that is larger still; infinite
        for anything else.
        """
        if not (_is_number(self.before) and _is_number(self.after)):
            return math.inf
        return abs(self.after - self.before) / max(abs(self.before), abs(self.after), self.scale)

    def __str__(self) -> str:
        moved = "" if math.isinf(self.share) else f" ({self.share:.2g})"
        return f"{self.place}: {self.before!r} -> {self.after!r}{moved}"


def differences(before: Answers, after: Answers, *, exact: bool = False) -> list[Difference]:
    """What moved, most first: beyond the tolerance, or at all. A key that came anew has moved
    nothing.
    """
    found = []
    for key, answer in before.items():
        tolerance = 0.0 if exact else TOLERANCES.get(key.partition("/")[0], TOLERANCE)
        found += [
            each
            for each in _differences(key, answer, after.get(key, ABSENT))
            if each.share > tolerance
        ]
    return sorted(found, key=lambda each: -each.share)


def _differences(
    place: str, before: Any, after: Any, *, scale: float = 0.0
) -> Iterator[Difference]:
    if isinstance(before, dict) and isinstance(after, dict):
        name = place.rpartition("/")[2]
        if name in ROUNDED_AS_A_WHOLE:
            scale = ROUNDED_AS_A_WHOLE[name] or max(before.values())
        for key, value in before.items():
            yield from _differences(f"{place}/{key}", value, after.get(key, ABSENT), scale=scale)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{place}/{index}", one, other)
    elif before != after or _is_number(before) != _is_number(after):
        yield Difference(place=place, before=before, after=after, scale=scale)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def load(lines: Iterable[str]) -> dict[str, Any]:
    """Answers by key from lines of `{key, answer}`."""
    return {row["key"]: row["answer"] for row in map(json.loads, lines)}


def normal(answers: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Answers by key as JSON brings them back: tuples are lists."""
    return {key: json.loads(json.dumps(answer)) for key, answer in answers}


def files(answers: Answers) -> dict[str, str]:
    """The stored files: name and content, one for each family of answers; a batch's are those of
    its queries alone.
    """
    lines: dict[str, list[str]] = {}
    for key, answer in answers.items():
        family = key.partition("/")[0]
        if family != "batch":
            lines.setdefault(f"{family}.jsonl", []).append(
                json.dumps({"key": key, "answer": answer}, separators=(",", ":"))
            )
    return {name: "\n".join(rows) + "\n" for name, rows in lines.items()}


def stored() -> dict[str, Any]:
    """The answers in the repository."""
    return load(
        line for path in sorted(STORED.glob("*.jsonl")) for line in path.read_text().splitlines()
    )
