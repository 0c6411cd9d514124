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
    """Content of a JSON, YAML or TOML file; empty for a script."""
    keys: Set[str] = frozenset()
    """Top-level keys, with underscores."""
    files: bool = False
    """True if files were passed with the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of a format. The matching sign with the lowest rank determines the format."""

    place: Place
    """Where the sign is looked for: in the text (tested first), in the keys of a file, or in a
    script.
    """
    rank: int
    """Lower ranks for more specific signs."""
    matches: Callable[[Evidence], bool]
    refused: str = ""
    """Description of the format, if it is unsupported; empty otherwise."""


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
