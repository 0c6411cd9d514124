"""Write shell scripts: commands with options, and comments for values that the user fills in."""

import re
import shlex
from collections.abc import Iterable, Mapping

FILL = "FILL IN"
"""Marks values that the user fills in. It is followed by the value's number in the list at the top.
"""


def script_text(lines: Iterable[str]) -> str:
    """Return a bash script with these lines."""
    return "\n".join(("#!/usr/bin/env bash", *lines, ""))


def required_variable(name: str, meaning: str) -> str:
    """Return a reference to a shell variable. If it is unset, bash prints `meaning` and exits.

    Raises:
        ValueError: `meaning` contains characters that bash would interpret, such as a single quote.
    """
    if re.search(r"['\"`$\\}]", meaning):
        raise ValueError(f"{meaning!r} must not contain a quote, $, }} or backslash")
    return f"${{{name}:?{meaning}}}"


def option_lines(options: Mapping[str, Iterable[str]], *, prefix: str = "") -> list[str]:
    """Return one line per option, with its values quoted."""
    return [shlex.join((f"{prefix}{name}", *words)) for name, words in options.items()]


def assignments(options: Mapping[str, str]) -> list[str]:
    """Return a `key=value` word for each option, as Hydra requires."""
    return [f"{name}={value}" for name, value in options.items()]


def multiline_command(*lines: str) -> str:
    """Return a command on several lines that passes on the script's own arguments."""
    return " \\\n    ".join((*lines, '"$@"'))


def fill_in_comment(parts: Iterable[str]) -> list[str]:
    """Return comment lines that list the values that the user fills in."""
    return [
        f"# Fill in, each marked {FILL} below:",
        *(f"#   {number}. {what}" for number, what in enumerate(parts, 1)),
    ]
