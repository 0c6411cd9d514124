"""What gives away whose configuration a text is."""

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

Place = Literal["text", "keys", "script"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A text whose tool is looked for."""

    text: str
    content: Mapping[str, Any] = field(default_factory=dict)
    """What a file of keys holds; a script has none."""
    keys: Set[str] = frozenset()
    """Its outermost keys, with underscores."""
    files: bool = False
    """Whether files came with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What gives a tool's configuration away. Of the signs that hold, the one of the lowest rank
    decides.
    """

    of: Place
    """Where it stands: in any text, which is tried first, in a file of keys, or in a script."""
    rank: int
    """Lower for what is more particular."""
    holds: Callable[[Evidence], bool]
    refused: str = ""
    """What such a text is, where it is not read."""


def words(pattern: str) -> Callable[[Evidence], bool]:
    """Return a test for a regular expression in the text."""
    return lambda evidence: re.search(pattern, evidence.text) is not None


def any_key(*names: str) -> Callable[[Evidence], bool]:
    """Return a test for one of the keys among the outermost ones."""
    return lambda evidence: not evidence.keys.isdisjoint(names)


def key_within(*names: str) -> Callable[[Evidence], bool]:
    """Return a test for one of the keys anywhere near the beginning."""
    return lambda evidence: any(
        name in evidence.keys or f"{name}:" in evidence.text[:20_000] for name in names
    )
