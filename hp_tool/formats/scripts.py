"""What written scripts share: how a command and its options stand in them, and what is left to the
user.
"""

import re
import shlex
from collections.abc import Iterable, Mapping

FILL = "FILL IN"
"""Marks what is the user's, with the number that it has in the list at the top."""


def bash(lines: Iterable[str]) -> str:
    """Return a script of these lines."""
    return "\n".join(("#!/usr/bin/env bash", *lines, ""))


def required(name: str, meaning: str) -> str:
    """Return a variable, to stand between double quotes, without which the script stops and prints
    `meaning`.

    Raises ValueError for a meaning with characters that bash reads there: a lone quote does not
    even end.
    """
    if re.search(r"['\"`$\\}]", meaning):
        raise ValueError(f"no quote, $, }} or backslash may stand in {meaning!r}")
    return f"${{{name}:?{meaning}}}"


def option_lines(options: Mapping[str, Iterable[str]], *, prefix: str = "") -> list[str]:
    """Return each option with the words behind it, quoted, as a line."""
    return [shlex.join((f"{prefix}{name}", *words)) for name, words in options.items()]


def assignments(options: Mapping[str, str]) -> list[str]:
    """Return `key=value` of each option, as Hydra takes them."""
    return [f"{name}={value}" for name, value in options.items()]


def invocation(*lines: str) -> str:
    """Return a command over several lines; whatever follows the script's name is passed on to
    it.
    """
    return " \\\n    ".join((*lines, '"$@"'))


def fill_in(parts: Iterable[str]) -> list[str]:
    """Return the comment that lists what is the user's."""
    return [
        f"# Fill in, each marked {FILL} below:",
        *(f"#   {number}. {what}" for number, what in enumerate(parts, 1)),
    ]
