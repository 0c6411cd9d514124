"""The engines' own argument parsers, rebuilt from what `record_engine_options` kept of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

TYPES = {"int": int, "human_readable_int": int, "float": float, "loads": json.loads}
DATACLASS = "_compute_kwargs.<locals>.parse_dataclass"
"""vLLM's type of options that take a mapping."""


class Strict(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)


@cache
def parser(engine: str) -> Strict:
    recorded = json.loads(
        (Path(__file__).with_name("engine_options") / f"{engine}.json").read_text()
    )
    made = Strict(add_help=False, allow_abbrev=False)
    for option in recorded["options"]:
        if option["words"] == 0:
            made.add_argument(*option["names"], action="store_true")
        else:
            convert = json.loads if option["type"] == DATACLASS else TYPES.get(option["type"], str)
            words = {} if option["words"] == 1 else {"nargs": option["words"]}
            choices = option["choices"] and [convert(each) for each in option["choices"]]
            made.add_argument(*option["names"], type=convert, choices=choices, **words)
    made.add_argument("model", nargs="?")
    return made


def parsed(engine: str, words: Sequence[str]) -> dict[str, Any]:
    """The options that a command gives, by their first name. AssertionError for what the engine's
    parser would refuse.
    """
    known = parser(engine)
    first = {
        action.dest: action.option_strings[0] for action in known._actions if action.option_strings
    }
    given = vars(known.parse_args(words))
    return {
        first[dest]: value
        for dest, value in given.items()
        if dest in first and value not in (None, False)
    }
