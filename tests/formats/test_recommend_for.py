"""`hp-tool recommend --for TOOL` ranks only layouts that the tool can be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.errors import InputError

TRAINING = (
    *("--model", "llama-3-8b", "--gpu", "h100", "--num-gpus", "16"),
    *("--sequence-length", "4096", "--global-batch-size", "64"),
)


def ask(*words: str) -> Any:
    result = CliRunner().invoke(build(), list(words))
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("tool", ["torchtitan", "deepspeed", "nanotron", "megatron-lm"])
def test_every_recommended_layout_can_be_exported(tool: str, tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(ask("recommend", *TRAINING, "--for", tool, "--top", "4", "--json"))
    rows = json.loads(answer.read_text())["recommendations"]
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1)) and rows
    for rank in range(1, len(rows) + 1):
        assert ask("export", str(answer), "--format", tool, "--rank", str(rank))


def test_layouts_that_the_tool_has_no_setting_for_are_left_out() -> None:
    """DeepSpeed's JSON has no tensor parallelism: the fixed size is left open, and said."""
    words = ("recommend", *TRAINING, "--set", "parallel.tensor_parallel_size=2", "--json")
    plain = json.loads(ask(*words))["recommendations"]
    assert {row["parallel"]["tensor_parallel_size"] for row in plain} == {2}
    result = CliRunner().invoke(build(), [*words, "--for", "deepspeed"])
    rows = json.loads(result.stdout)["recommendations"]
    assert {row["parallel"]["tensor_parallel_size"] for row in rows} == {1}
    assert "parallel.tensor_parallel_size" in result.stderr


def test_the_pareto_front_holds_no_layout_that_the_tool_cannot_be_told() -> None:
    """Accelerate checkpoints whole layers: a front of all layouts would have others."""
    words = ("recommend", *TRAINING, "--pareto", "memory", "--top", "1", "--json")
    front = json.loads(ask(*words, "--for", "accelerate"))["pareto"]
    assert {row["parallel"]["recompute"] for row in front} <= {"none", "per_layer", "full"}


def test_a_serving_tool_is_ranked_under_its_engine(tmp_path: Path) -> None:
    query = tmp_path / "query.json"
    query.write_text(
        json.dumps(
            {
                "kind": "inference",
                "model": "qwen3-32b",
                "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
                "inference": {"input_length": 4000, "output_length": 500, "concurrency": 64},
            }
        )
    )
    answer = json.loads(ask("recommend", str(query), "--for", "sglang", "--json"))
    assert answer["query"]["inference"]["engine"] == "sglang"
    direct = json.loads(ask("recommend", str(query), "--set", "inference.engine=sglang", "--json"))
    assert answer["recommendations"] == direct["recommendations"]


@pytest.mark.parametrize("tool", ["vllm", "nothing"])
def test_a_tool_that_does_not_train_is_refused_by_name(tool: str) -> None:
    with pytest.raises(InputError, match=f"no training format is named {tool}"):
        CliRunner().invoke(build(), ["recommend", *TRAINING, "--for", tool], catch_exceptions=False)
