"""`hp-tool estimate` and `recommend` for queries of kind inference, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

QUERY = """
kind: inference
model: llama-3.1-8b
cluster: {gpu: h100-sxm-80gb, num_gpus: 2}
inference: {input_length: 1024, output_length: 256, concurrency: 32, engine: trtllm}
"""


def run(*arguments: str, query: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hp_tool.cli.main import main; main()", *arguments]
    return subprocess.run(command, input=query, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


@pytest.mark.parametrize(("task", "shown"), [("estimate", "output tokens/s/GPU"), ("recommend", "TTFT")])
def test_people_get_tables_and_programs_json(task: str, shown: str) -> None:
    table = run(task, "-", query=QUERY)
    assert table.returncode == 0 and shown in table.stdout
    answer = json.loads(run(task, "-", "--json", query=QUERY).stdout)
    assert answer["status"] == "ok"


def test_a_missed_target_exits_3() -> None:
    found = run("estimate", "-", query=QUERY + "targets: {tpot_s: 0.0001}\n")
    assert found.returncode == 3 and "target_missed" in found.stdout and "How to fix it" in found.stdout
    assert run("recommend", "-", query=QUERY + "targets: {tpot_s: 0.0001}\n").returncode == 3


def test_bad_input_exits_2() -> None:
    found = run("estimate", "-", query=QUERY.replace("trtllm", "nothing"))
    assert found.returncode == 2 and "inference.engine" in found.stderr
