"""Pytest plugin (`-p benchmarks.mutants.reached --reached FILE`) that records which functions of
hp_tool each test file reaches.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import pytest

PACKAGE = "hp_tool/"


@dataclass(slots=True)
class Reach:
    """The functions that one test file reaches."""

    seconds: float = 0.0
    functions: set[str] = field(default_factory=set)
    """Functions as `path:qualified name`. Code inside a function counts as that function. Other
    processes are not recorded.
    """


def read(file: Path) -> dict[str, Reach]:
    """Return the recorded functions by the path of the test file."""
    return {
        name: Reach(one["seconds"], set(one["functions"]))
        for name, one in json.loads(file.read_text()).items()
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reached", type=Path, help="the file to write")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config.rootpath, config.getoption("--reached")))


class _Recorder:
    def __init__(self, root: Path, output: Path) -> None:
        self._package, self._output = f"{root / PACKAGE}/", output
        self._cut = len(f"{root}/")
        self._reach: dict[str, Reach] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = item.location[0]
        if file not in self._reach:
            forget_results()
        reach = self._reach.setdefault(file, Reach())
        seen = reach.functions

        def trace(frame: FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            if code.co_filename.startswith(self._package):
                seen.add(
                    f"{code.co_filename[self._cut :]}:{code.co_qualname.partition('.<locals>')[0]}"
                )

        started = time.perf_counter()
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            reach.seconds += time.perf_counter() - started

    def pytest_sessionfinish(self) -> None:
        reach = {
            name: asdict(one) | {"functions": sorted(one.functions)}
            for name, one in self._reach.items()
        }
        self._output.write_text(json.dumps(reach))


def forget_results() -> None:
    """Clear the caches of the package; otherwise only the first test file would reach the functions
    with cached results.
    """
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith(
            PACKAGE.rstrip("/")
        ):
            each.cache_clear()
