"""The command line in an empty folder, as a process and within this one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests import command_line
from tests.command_line import COMMAND, Ended

Run = Callable[..., Ended]


@pytest.fixture
def hp_tool(tmp_path: Path) -> Run:
    """Runs `hp-tool ARGUMENTS` as a process, in an empty folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HP_")}
    environment["XDG_DATA_HOME"] = str(
        tmp_path / "data"
    )  # not the user's database: what it knows would correct answers

    def run(*arguments: str, stdin: str = "") -> Ended:
        done = subprocess.run(
            (*COMMAND, *arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env=environment,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the same entry point in this process: the many small cases need not start an interpreter
    each.
    """
    for name in [name for name in os.environ if name.startswith("HP_")]:
        monkeypatch.delenv(name)
    return partial(command_line.hp_tool, folder=tmp_path, XDG_DATA_HOME=str(tmp_path / "data"))


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
        """  # noqa: E501
    )
    return path
