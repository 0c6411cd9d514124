"""`hp-tool size`: as a process, with flags and files, tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_a_process_answers_people_and_programs(hp_tool: Run) -> None:
    shown = hp_tool("size", "--gpu", "h100-sxm-80gb", "--num-gpus", "64", "--days", "14")
    assert shown.returncode == 0 and shown.stderr == ""
    for words in (
        "layers x",
        "14.0 days on 64 devices",
        "goodput",
        "learning_rate",
        "arXiv 2401.02954",
    ):
        assert words in shown.stdout
    answer = json.loads(
        hp_tool("size", "-", "--json", stdin="id: mine\nparameters: 7.0e9\n").stdout
    )
    assert (answer["id"], answer["status"]) == ("mine", "ok")
    assert answer["sizing"]["tokens_per_parameter"] > 10.0


def test_flags_lie_over_the_file(entry_point: Run, tmp_path: Path) -> None:
    path = tmp_path / "budget.yaml"
    path.write_text("cluster: {gpu: h100-sxm-80gb, num_gpus: 64}\nparameters: 7.0e9\n")
    found = entry_point(
        "size", str(path), "--num-gpus", "32", "--set", "parallel.tensor_parallel_size=2", "--json"
    )
    sizing = json.loads(found.stdout)["sizing"]
    assert sizing["num_gpus"] == 32
    assert sizing["recommendation"]["parallel"]["tensor_parallel_size"] == 2


def test_exit_codes(entry_point: Run) -> None:
    assert entry_point("size").returncode == 2
    assert "did you mean" in entry_point("size", "--set", "parameter=1e9").stderr
    missed = entry_point(
        "size", "--gpu", "h100-sxm-80gb", "--num-gpus", "8", "--model", "llama-3-70b", "--days", "1"
    )
    assert missed.returncode == 3 and "target_missed" in missed.stdout
