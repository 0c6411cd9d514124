"""Write shell scripts: commands with options, and comments about what the user must fill in."""

import re
import shlex
from collections.abc import Iterable, Mapping

FILL = "FILL IN"
"""Mark of values that the user must fill in, with the number in the list at the top."""


def script_text(lines: Iterable[str]) -> str:
    """Return a bash script with these lines."""
    return "\n".join(("#!/usr/bin/env bash", *lines, ""))


def required_variable(name: str, meaning: str) -> str:
    """Return a reference to a shell variable that must be set; otherwise bash prints `meaning`.

    Raises:
        ValueError: The meaning has characters with a meaning to bash, such as a single quote.
    """
    if re.search(r"['\"`$\\}]", meaning):
        raise ValueError(f"{meaning!r} must not contain a quote, $, }} or backslash")
    return f"${{{name}:?{meaning}}}"


def option_lines(options: Mapping[str, Iterable[str]], *, prefix: str = "") -> list[str]:
    """Return a line with the quoted values for each option."""
    return [shlex.join((f"{prefix}{name}", *words)) for name, words in options.items()]


def assignments(options: Mapping[str, str]) -> list[str]:
    """Return a `key=value` word for each option, as Hydra requires."""
    return [f"{name}={value}" for name, value in options.items()]


def multiline_command(*lines: str) -> str:
    """Return a command over several lines, followed by the script's own arguments."""
    return " \\\n    ".join((*lines, '"$@"'))


def fill_in_comment(parts: Iterable[str]) -> list[str]:
    """Return a comment that lists what the user must fill in."""
    return [
        f"# Fill in, each marked {FILL} below:",
        *(f"#   {number}. {what}" for number, what in enumerate(parts, 1)),
    ]
