"""The command line as its users have it: arguments and streams in, streams and an exit code out."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from hp_tool.cli.main import main

COMMAND = (sys.executable, "-c", "from hp_tool.cli.main import main; main()")
"""A process of its own, for what a process alone has: signals, pipes, what it imports."""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def hp_tool(*arguments: str, stdin: str = "", folder: Path = ROOT, **environment: str) -> Ended:
    """Run the entry point of `hp-tool` in this process: an interpreter each time would take a
    second.

    `folder`: where it runs. `environment`: added to this process's.
    """
    streams = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    ]
    with (
        pytest.MonkeyPatch.context() as patch,
        chdir(folder),
        redirect_stdout(streams[0]),
        redirect_stderr(streams[1]),
    ):
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(
            logging.getLogger(), "handlers", []
        )  # pytest's, which would keep warnings from standard error
        patch.setattr(sys, "argv", ["hp-tool", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return Ended(ended.value.code, out, err)
