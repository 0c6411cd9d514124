"""Parse a bash script into a syntax tree."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from hp_tool.errors import InputError
from hp_tool.extras import require

if TYPE_CHECKING:
    import tree_sitter

MAX_CHARACTERS = 200_000
_STRAY_BACKSLASH = re.compile(r"\\(?=\r?\n[ \t]*(\r?\n|\Z)|\Z)")
"""Matches a backslash before an empty line or at the end of the text."""
_PLACEHOLDER = re.compile(r"(?<=[\s=/:])<([A-Za-z](?:[\w .,/-]{0,60}\w)?)>(?=[\s/:]|$)")
"""Matches placeholders such as <your token>, which bash would parse as a redirection."""


@functools.cache
def _bash_language() -> tree_sitter.Language:
    require("import", by="reading shell commands")
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Language(tree_sitter_bash.language())


def parse(content: bytes) -> tree_sitter.Node:
    """Return the root of the syntax tree of a text. `has_error` is True for invalid bash."""
    language = _bash_language()
    from tree_sitter import Parser

    return Parser(language).parse(content).root_node


def parse_script(text: str) -> tree_sitter.Node:
    """Return the root of a script's syntax tree.

    Raises:
        InputError: The script cannot be parsed; the error names the line.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"the command has {len(text):,} characters; the maximum is {MAX_CHARACTERS:,}",
            code="too_large",
        )
    text = _PLACEHOLDER.sub(lambda match: f"${{{re.sub(r'[^0-9A-Za-z]', '_', match[1])}}}", text)
    root = parse(text.encode(errors="replace"))
    if root.has_error and (ended := _STRAY_BACKSLASH.sub(" ", text)) != text:
        root = parse(ended.encode(errors="replace"))
    if root.has_error:
        at = _first_error_line(root)
        line = (text.splitlines() or [""])[min(at, max(len(text.splitlines()) - 1, 0))].strip()[:80]
        raise InputError(
            f"line {at + 1} is not valid bash: {line}",
            code="syntax",
        )
    return root


def _first_error_line(root: tree_sitter.Node) -> int:
    node = root
    while True:
        inner = next(
            (
                child
                for child in node.children
                if child.has_error or child.is_error or child.is_missing
            ),
            None,
        )
        if inner is None or inner.is_error or inner.is_missing:
            return int((inner or node).start_point[0])
        node = inner
