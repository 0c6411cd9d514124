"""The command line as its users have it: arguments and streams in, streams and an exit code out."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hp_tool.cli.main import main


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]
COMMAND = (sys.executable, "-c", "from hp_tool.cli.main import main; main()")


@pytest.fixture
def hp_tool(tmp_path: Path) -> Run:
    """Runs `hp-tool ARGUMENTS` as a process, in an empty folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HP_")}
    environment["XDG_DATA_HOME"] = str(tmp_path / "data")  # not the user's database: what it knows would correct answers

    def run(*arguments: str, stdin: str = "") -> Ended:
        done = subprocess.run(
            (*COMMAND, *arguments), input=stdin, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the same entry point in this process: the many small cases need not start an interpreter each."""
    for name in os.environ:
        if name.startswith("HP_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def run(*arguments: str, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["hp-tool", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        streams = capsys.readouterr()
        return Ended(ended.value.code, streams.out, streams.err)

    return run


@pytest.fixture
def query_file(tmp_path: Path) -> Path:
    """GPT-3 175B on 64 A100: one configuration that fits."""
    path = tmp_path / "query.yaml"
    path.write_text(
        """
        id: row-17
        kind: training
        model: gpt3-175b
        cluster: {gpu: a100-sxm-80gb, num_gpus: 64, gpus_per_node: 8}
        training: {sequence_length: 2048, global_batch_size: 64, precision: bf16, total_tokens: 300.0e9}
        parallel: {tensor_parallel_size: 8, pipeline_parallel_size: 8, micro_batch_size: 1, recompute: selective}
        """
    )
    return path
