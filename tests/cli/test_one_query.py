"""`hp-tool estimate` and `recommend`: files and flags, tables and JSON, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_tool.errors import StoreError
from hp_tool.questions import answers

Run = Callable[..., Any]
FLAGS = (
    "--model=gpt3-175b",
    "--gpu=a100-sxm-80gb",
    "--num-gpus=64",
    "--sequence-length=2048",
    "--global-batch-size=64",
    "--precision=bf16",
    "--total-tokens=300e9",
)
ONE = (
    "--set=parallel.tensor_parallel_size=8",
    "--set=parallel.pipeline_parallel_size=8",
    "--set=parallel.micro_batch_size=1",
    "--set=parallel.recompute=selective",
)


def test_estimate_answers_file_flags_and_standard_input_alike(
    hp_tool: Run, query_file: Path
) -> None:
    from_file = hp_tool("estimate", str(query_file), "--json")
    assert (from_file.returncode, from_file.stderr) == (0, "")
    answer = json.loads(from_file.stdout)
    assert answer.keys() == {"id", "status", "estimate", "calibrated_estimate", "query"}
    assert (answer["id"], answer["status"], answer["estimate"]["feasible"]) == (
        "row-17",
        "ok",
        True,
    )

    from_stdin = hp_tool("estimate", "-", "--json", stdin=query_file.read_text())
    assert json.loads(from_stdin.stdout) == answer
    from_flags = hp_tool("estimate", *FLAGS, *ONE, "--json")
    assert json.loads(from_flags.stdout)["estimate"] == answer["estimate"]


def test_set_lays_a_value_over_the_file(entry_point: Run, query_file: Path) -> None:
    plain = json.loads(entry_point("estimate", str(query_file), "--json").stdout)["estimate"]
    more = entry_point(
        "estimate", str(query_file), "--set=parallel.recompute=full", "--num-gpus=128", "--json"
    )
    changed = json.loads(more.stdout)["estimate"]
    assert changed["parallel"] == plain["parallel"] | {"recompute": "full", "data_parallel_size": 2}
    assert changed["memory"]["activations_bytes"] < plain["memory"]["activations_bytes"]


def test_estimate_shows_people_parts_and_totals(entry_point: Run, query_file: Path) -> None:
    shown = entry_point("estimate", str(query_file)).stdout
    for text in (
        "TP 8, PP 8, DP 1, micro-batch 1",
        "optimizer",
        "GiB",
        "pipeline bubble",
        "MFU",
        "GPU-hours",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("parallel.tensor_parallel_size=5", "heads_not_divisible"),
        ("parallel.data_parallel_size=3", "world_size_mismatch"),
        ("training.sequence_length=131072", "memory"),
    ],
)
def test_what_cannot_be_exits_3_and_says_why(
    entry_point: Run, query_file: Path, setting: str, code: str
) -> None:
    result = entry_point("estimate", str(query_file), f"--set={setting}", "--json")
    assert result.returncode == 3
    estimate = json.loads(result.stdout)["estimate"]
    assert not estimate["feasible"]
    assert code in [reason["code"] for reason in estimate["reasons"]]
    assert all(reason["message"] and reason["needed"] is not None for reason in estimate["reasons"])


def test_people_are_told_what_mends_it(entry_point: Run, query_file: Path) -> None:
    shown = entry_point("estimate", str(query_file), "--set=parallel.tensor_parallel_size=5").stdout
    assert "How to fix it" in shown and "TP 5 -> 8" in shown
    late = entry_point("estimate", str(query_file), "--set=constraints.max_days=0.001").stdout
    assert "comes nearest, but target_missed: " in late and "times the maximum of 0.001: " in late


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set=training.sequense_length=5",), "did you mean sequence_length?"),
        (("--model=gpt3-176b",), "did you mean 'gpt3-175b'"),
        (("--gpu=a1001",), "did you mean 'a100"),
        (("--num-gpus=63",), "cluster.num_gpus"),
        (("--set=parallel.zero_stage",), "KEY=VALUE"),
        (("--set=parallel.zero_stage=[",), "--set"),
        (("--set=kind.of=1",), "not a mapping"),
        (("--total-tokens=nan",), "training.total_tokens: expected a finite number, got NaN"),
        (
            ("--set=parallel.micro_batch_size=[1, .inf]",),
            "parallel.micro_batch_size.1: expected a valid integer, got Infinity",
        ),
        ((f"--model={'a' * 5000}",), f"'{'a' * 200}'"),
        (("--set=training.task=lora",), "training.lora"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
def test_bad_input_exits_2_with_one_line_that_names_it(
    entry_point: Run, query_file: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = entry_point("estimate", str(query_file), *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (("estimate", "--json", "--set=parallel.tp=8"), "parallel.tp"),
        (("recommend", "missing.yaml", "--json"), None),
    ],
)
def test_whoever_asks_for_json_gets_bad_input_as_json_too(
    entry_point: Run, command: tuple[str, ...], field: str | None
) -> None:
    result = entry_point(*command)
    answer = json.loads(result.stdout)
    assert (result.returncode, answer["status"], answer["error"]["field"]) == (2, "error", field)
    assert answer["error"]["code"] and answer["error"]["message"] in result.stderr


@pytest.mark.parametrize(
    "arguments", [("estimate",), ("estimate", "missing.yaml"), ("estimate", "."), ("recommend",)]
)
def test_no_query_is_bad_input(entry_point: Run, arguments: tuple[str, ...]) -> None:
    result = entry_point(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("hp-tool: ")


def test_recommend_ranks_what_fits(entry_point: Run) -> None:
    result = entry_point("recommend", *FLAGS, "--top=5", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    rows = answer["recommendations"]
    assert [row["rank"] for row in rows] == [1, 2, 3, 4, 5]
    expected = [row["expected_step_s"] for row in rows]
    assert expected[1:] == sorted(expected[1:]) and expected[0] <= 1.04 * min(expected)
    assert [row["group"] for row in rows] == sorted(row["group"] for row in rows)
    assert all(0.0 <= row["out_of_memory_probability"] < 1.0 for row in rows) and answer["groups"]
    assert all(row["estimate"]["feasible"] for row in rows)
    assert answer["space"]["legal"] >= answer["space"]["feasible"] >= 5
    assert answer["space"]["legal"] - answer["space"]["feasible"] == answer["rejections"]["memory"]


def test_a_recommended_configuration_is_valid_input(entry_point: Run, tmp_path: Path) -> None:
    first = json.loads(entry_point("recommend", *FLAGS, "--top=1", "--json").stdout)[
        "recommendations"
    ][0]
    (tmp_path / "again.json").write_text(
        json.dumps(
            {
                "kind": "training",
                "model": "gpt3-175b",
                "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 64},
                "training": {
                    "sequence_length": 2048,
                    "global_batch_size": 64,
                    "precision": "bf16",
                    "total_tokens": 300e9,
                },
                "parallel": first["parallel"],
            }
        )
    )
    again = json.loads(entry_point("estimate", "again.json", "--json").stdout)
    assert again["estimate"]["time"] == first["estimate"]["time"]


def test_nothing_feasible_exits_3_and_counts_the_reasons(entry_point: Run) -> None:
    result = entry_point("recommend", *FLAGS, "--num-gpus=8", "--json")
    assert result.returncode == 3
    answer = json.loads(result.stdout)
    assert answer["recommendations"] == []
    assert answer["space"]["feasible"] == 0 < answer["rejections"]["memory"]


def test_our_own_fault_exits_1(entry_point: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(query: object, **options: object) -> None:
        raise StoreError("the database does not answer")

    monkeypatch.setattr(answers, "answer_estimate", broken)
    result = entry_point("estimate", *FLAGS)
    assert (result.returncode, result.stdout, result.stderr) == (
        1,
        "",
        "hp-tool: the database does not answer\n",
    )


def test_help_and_version_name_everything(entry_point: Run) -> None:
    assert entry_point("--version").stdout.strip().count(".") == 2
    shown = entry_point("--help").stdout
    for command in (
        "estimate",
        "recommend",
        "tune",
        "batch",
        "models",
        "gpus",
        "clusters",
        "recipes",
        "db",
        "serve",
        "worker",
    ):
        assert command in shown


def test_a_config_json_is_shown_with_its_parameters(entry_point: Run, tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    shown = {
        " ".join(line.split()) for line in entry_point("models", str(path)).stdout.splitlines()
    }
    assert {
        "parameters 14,315,784,192",
        "active parameters 2,689,173,504",
        "shared_expert_gate True",
    } <= shown
    path.write_text(json.dumps({"model_type": "rwkv", "hidden_size": 64}))
    refused = entry_point("models", str(path))
    assert refused.returncode == 2
    assert (
        "model_type 'rwkv' is not supported: it has recurrent or convolutional layers that are"
        in refused.stderr
    )


def test_recipes_are_listed_shown_and_asked_for(entry_point: Run) -> None:
    assert "megatron-bridge-26.06" in entry_point("recipes").stdout
    shown = entry_point("recipes", "megatron-bridge-26.06")
    assert shown.returncode == 0 and "training.gradient_precision: bf16" in shown.stdout
    assert "modules: [mla_up_proj]" in shown.stdout, "brackets are text, not markup"
    rules = json.loads(entry_point("recipes", "megatron-bridge-26.06", "--json").stdout)["rules"]
    assert {"gradient_precision": "bf16", "cross_entropy": "in_place"} in [
        rule["training"] for rule in rules
    ]
    unknown = entry_point("recipes", "megatron-bridge-26.6")
    assert unknown.returncode == 2 and "did you mean 'megatron-bridge-26.06'" in unknown.stderr
    flags = (
        "--model",
        "llama-3-8b",
        "--gpu",
        "h100-sxm-80gb",
        "--num-gpus",
        "8",
        "--sequence-length",
        "4096",
    )
    asked = entry_point(
        "recommend",
        *flags,
        "--global-batch-size",
        "64",
        "--set",
        "training.recipe=megatron-bridge-26.06",
        "--json",
    )
    best = json.loads(asked.stdout)["recommendations"][0]["estimate"]
    assert best["provenance"]["assumed"]["training.gradient_precision"] == "bf16"
