"""The report of predictions against one device: the command as its users have it, on a grid that
any machine runs.
"""

from __future__ import annotations

import datetime
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.profiler.gpu_report import full_grid
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from tests.conftest import skip_or_fail


def test_the_grid_is_large_and_some_of_it_fits_on_no_device() -> None:
    grid = full_grid()
    assert len(set(map(repr, grid))) == len(grid) >= 30
    largest = [
        case
        for case in grid
        if (case.sequence_length, case.micro_batch_size, case.recompute) == (8192, 16, "none")
    ]
    for case in largest:
        query = {
            "kind": "training",
            "model": case.model,
            "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 1},
            "training": {
                "sequence_length": 8192,
                "global_batch_size": 32,
                "precision": case.precision,
            },
            "parallel": {"micro_batch_size": 16},
        }
        assert not estimate(query=parse_query(query)).feasible
    assert len(largest) == 2


@pytest.mark.components
@pytest.mark.long
def test_the_command_writes_a_dated_report(tmp_path: Path) -> None:
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    command = [
        sys.executable,
        "-m",
        "benchmarks.profiler.gpu_report",
        "--gpu",
        "cpu",
        "--grid",
        "tiny",
        "--steps",
        "2",
    ]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    assert path.name == f"{datetime.datetime.now(datetime.UTC).date()}-cpu.md"
    report = path.read_text()
    assert "3 configurations on one device, 3 ran, 0 were out of memory" in report
    assert "torch 2." in report and "megatron-core" in report
    assert (
        report.count("| tiny-gpt |") == 2
        and "| step time |" in report
        and "| peak memory |" in report
    )
