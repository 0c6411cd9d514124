"""Signs that identify the format of a text."""

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

Place = Literal["text", "keys", "script"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A text and the properties that identify its format."""

    text: str
    content: Mapping[str, Any] = field(default_factory=dict)
    """Content of a key file; empty for a script."""
    keys: Set[str] = frozenset()
    """Top-level keys, with underscores."""
    files: bool = False
    """Whether files were passed with the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of a format; of all matching signs, the one with the lowest rank decides."""

    place: Place
    """The text itself (tested first), the keys of a file, or a script."""
    rank: int
    """Lower for more specific signs."""
    matches: Callable[[Evidence], bool]
    refused: str = ""
    """Description of an unsupported format; empty for a supported one."""


def matches_pattern(pattern: str) -> Callable[[Evidence], bool]:
    """Return a test that the text matches a regular expression."""
    return lambda evidence: re.search(pattern, evidence.text) is not None


def has_any_key(*names: str) -> Callable[[Evidence], bool]:
    """Return a test that the file has one of these top-level keys."""
    return lambda evidence: not evidence.keys.isdisjoint(names)


def has_key_near_top(*names: str) -> Callable[[Evidence], bool]:
    """Return a test that one of these keys is near the beginning of the text."""
    return lambda evidence: any(
        name in evidence.keys or f"{name}:" in evidence.text[:20_000] for name in names
    )
