"""Parse recipe overrides (KEY=VALUE as in Hydra) into the content of Bridge's YAML file."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from hp_tool.catalog import documents
from hp_tool.formats.shell import Word

_OVERRIDE_PATTERN = re.compile(r"[+~]{0,2}[A-Za-z_][\w-]*(\.[\w-]+)*(=|$)")
_MISSING_SPACE = re.compile(r"([{,]\s*[\w.]+):(?=[^\s])")
"""Matches a key of a Hydra mapping without a space after the colon, which YAML requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """An override of one key, written KEY=VALUE."""

    key: str
    """Dotted key without leading signs."""
    value: Any
    """Value parsed as YAML. Text that contains an undefined variable stays as it is."""
    line: int
    deletes: bool = False
    """True for `~KEY`, which deletes the key."""


def is_override(text: str) -> bool:
    """Return True if a word is an override."""
    match = _OVERRIDE_PATTERN.match(text)
    return match is not None and (match[0].endswith("=") or text.startswith("~"))


def parse_override(word: Word) -> Override:
    """Return the override in a word."""
    key, _, text = word.text.partition("=")
    return Override(
        key=key.lstrip("+~"), value=_parse_value(text), line=word.line, deletes=key.startswith("~")
    )


def _parse_value(text: str) -> Any:
    try:
        return documents.load_yaml(_MISSING_SPACE.sub(r"\1: ", text) if "{" in text else text)
    except yaml.YAMLError:
        return text


def apply_overrides(content: dict[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """Return the content with the overrides applied in order."""
    result = dict(content)
    for override in overrides:
        *sections, name = override.key.split(".")
        node = result
        for section in sections:
            inner = node.get(section)
            node[section] = dict(inner) if isinstance(inner, dict) else {}
            node = node[section]
        node[name] = override.value
    return result


def parse_override_list(text: str) -> list[Word]:
    """Return the overrides in a text of only overrides; an empty list for other text."""
    words = []
    for number, line in enumerate(text.splitlines(), 1):
        row = line.strip().removesuffix("\\").strip()
        if not row or row.startswith("#"):
            continue
        try:
            parts = shlex.split(row)
        except ValueError:
            return []
        if not all(is_override(part) for part in parts):
            return []
        words += [Word(part, number) for part in parts]
    return words
