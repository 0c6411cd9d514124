"""`python scripts/count_calls.py [QUERY]`: through how many files and calls one `hp_tool.estimate` has to be followed.

Counted is a second call, after imports and caches; of a generator, each time it goes on, as sys.setprofile reports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import hp_tool

PACKAGE = Path(hp_tool.__file__).parent
QUERY = PACKAGE.parent / "examples" / "gpt3-175b.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one call of a function passes through, inside hp_tool."""

    files: int
    functions: int
    calls: int
    calls_between_files: int
    """Caller and callee are both in hp_tool, in different files."""


def count_estimate(query: Path = QUERY) -> Counts:
    """The counts of a second `hp_tool.estimate(query)`."""
    estimate = hp_tool.estimate  # looked up here: hp_tool loads its functions late
    estimate(query)
    return count_calls(lambda: estimate(query))


def count_calls(function: Callable[[], object]) -> Counts:
    """The counts of one call."""
    calls: list[tuple[CodeType, CodeType]] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_back is not None:
            calls.append((frame.f_back.f_code, frame.f_code))

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(previous)
    inside = [(caller, callee) for caller, callee in calls if is_ours(callee)]
    return Counts(
        files=len({callee.co_filename for _, callee in inside}),
        functions=len({callee for _, callee in inside}),
        calls=len(inside),
        calls_between_files=sum(is_ours(caller) and caller.co_filename != callee.co_filename for caller, callee in inside),
    )


def is_ours(code: CodeType) -> bool:
    """Whether code is of hp_tool."""
    return Path(code.co_filename).is_relative_to(PACKAGE)


if __name__ == "__main__":
    print(count_estimate(*map(Path, sys.argv[1:])))
