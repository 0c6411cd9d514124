"""Small promises of the command line's answers: digits, hints, and what a printed object is good
for.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import command_line
from tests.command_line import Ended
from tests.torch_or_skip import profiler_extra_or_skip

LLAMA = ("--model", "llama-3-8b", "--gpu", "h100-sxm-80gb", "--num-gpus", "64")
LOAD = (
    "--sequence-length",
    "4096",
    "--global-batch-size",
    "128",
    "--set",
    "parallel.expert_parallel_size=8",
)


def hp_tool(*arguments: str, **environment: str) -> Ended:
    return command_line.hp_tool(*arguments, COLUMNS="250", **environment)


def test_a_printed_model_is_a_query_s_model_with_a_field_changed(tmp_path: Path) -> None:
    printed = json.loads(hp_tool("models", "llama-3-8b", "--json").stdout) | {
        "num_hidden_layers": 16
    }
    query = {
        "kind": "training",
        "model": printed,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 4096, "global_batch_size": 128},
    }
    (tmp_path / "query.json").write_text(json.dumps(query))
    answer = hp_tool("estimate", str(tmp_path / "query.json"), "--json")
    assert json.loads(answer.stdout)["status"] != "error", answer.stdout


def test_a_missing_batch_names_its_flags() -> None:
    answer = hp_tool("estimate", *LLAMA)
    assert answer.returncode == 2
    assert "--sequence-length" in answer.stderr and "--global-batch-size" in answer.stderr


def test_a_search_s_max_runs_are_its_budget(tmp_path: Path) -> None:
    (tmp_path / "query.yaml").write_text(
        Path("examples/quickstart.yaml").read_text().replace("budget_runs", "max_runs")
    )
    answer = hp_tool("tune", str(tmp_path / "query.yaml"), "--plan")
    assert (
        answer.returncode == 2
        and "budget_runs" in answer.stderr
        and "parallel_runs" not in answer.stderr
    )


def test_a_short_training_has_days_and_energy_with_digits() -> None:
    answer = hp_tool("estimate", *LLAMA, *LOAD[:4], "--total-tokens", "1e7")
    line = next(line for line in answer.stdout.splitlines() if "GPU-hours" in line)
    assert " 0.0 MWh" not in line and not line.startswith("0.0 days") and " 0 GPU-hours" not in line


def test_a_plan_before_any_run_keeps_within_its_limits(tmp_path: Path) -> None:
    profiler_extra_or_skip()
    url = f"sqlite:///{tmp_path / 'new.db'}"
    answer = hp_tool("tune", "examples/quickstart.yaml", "--plan", "--json", HP_DATABASE_URL=url)
    plan = json.loads(answer.stdout)["plan"]
    assert plan["first"]["wall_s"] <= plan["first"]["time_limit_s"]
    assert plan["gpu_seconds"] <= plan["most_gpu_seconds"]


@pytest.mark.parametrize("release", [(), ("--set", "training.framework_version=26.06")])
def test_experts_without_a_run_are_told_no_narrower(release: tuple[str, ...]) -> None:
    widths = []
    for framework in (("--set", "training.framework=torch-fsdp"), release):
        answer = hp_tool(
            "estimate",
            "--model",
            "mixtral-8x7b",
            *LLAMA[2:],
            *LOAD,
            "--set",
            "parallel.zero_stage=3",
            *framework,
            "--json",
        )
        low, high = json.loads(answer.stdout)["estimate"]["intervals"]["step_s"]
        widths.append(high / low)
    assert widths[0] >= widths[1]


def test_fewest_devices_need_no_number_of_them() -> None:
    answer = hp_tool(
        "recommend", *LLAMA[:4], *LOAD[:4], "--set", "objective=min_gpus", "--top", "1", "--json"
    )
    assert answer.returncode == 0, answer.stdout
    (row,) = json.loads(answer.stdout)["recommendations"]
    assert row["estimate"]["provenance"]["num_gpus"] <= 8


def test_the_fewest_devices_of_a_training_are_printed() -> None:
    fewest = "64"
    for _ in range(2):  # of many, then of no more than are needed
        offload = ("--set", "training.offload=none")
        asked = (
            *LLAMA[:4],
            "--num-gpus",
            fewest,
            *LOAD[:4],
            "--set",
            "objective=min_gpus",
            *offload,
            "--top",
            "1",
        )
        row = json.loads(hp_tool("recommend", *asked, "--json").stdout)["recommendations"][0]
        fewest = str(row["estimate"]["provenance"]["num_gpus"])
        assert fewest == str(row["set"]["cluster.num_gpus"]) != "64"
        assert hp_tool("recommend", *asked).stdout.startswith(f"Use {fewest} GPUs with TP ")


@pytest.mark.parametrize(
    "kind",
    [
        LOAD[:4],
        ("--set", "kind=inference", "--set", "inference={input_length: 1000, output_length: 100}"),
    ],
)
def test_an_estimate_for_the_fewest_devices_needs_their_number(kind: tuple[str, ...]) -> None:
    open_number = ("--set", "objective=min_gpus", "--set", "parallel.tensor_parallel_size=2")
    answer = hp_tool("estimate", *LLAMA[:4], *kind, *open_number)
    assert answer.returncode == 2, answer.stdout
    assert "cluster.num_gpus" in answer.stderr and "recommend" in answer.stderr
    assert hp_tool("estimate", *LLAMA, *kind, *open_number).returncode == 0
    ranked = hp_tool("recommend", *LLAMA[:4], *kind, *open_number, "--top", "1", "--json")
    assert "cluster.num_gpus" in json.loads(ranked.stdout)["recommendations"][0]["set"]


def test_other_objectives_still_need_a_number_of_devices() -> None:
    answer = hp_tool("recommend", *LLAMA[:4], *LOAD[:4])
    assert (
        answer.returncode == 2
        and "cluster.num_gpus" in answer.stderr
        and "min_gpus" in answer.stderr
    )


def test_an_export_that_costs_nothing_says_no_percentage(tmp_path: Path) -> None:
    query = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 4096, "global_batch_size": 128},
    }
    (tmp_path / "query.json").write_text(json.dumps(query))
    answer = hp_tool("export", str(tmp_path / "query.json"), "--for", "megatron-lm")
    assert answer.returncode == 0, answer.stderr
    assert "as fast as the query's own best" in answer.stderr and "+0.0%" not in answer.stderr


def test_a_short_sizing_has_days_and_hours_with_digits() -> None:
    answer = hp_tool(
        "size",
        "--parameters",
        "1e8",
        "--tokens",
        "1e8",
        "--gpu",
        "h100-sxm-80gb",
        "--num-gpus",
        "8",
    )
    (line,) = [line for line in answer.stdout.splitlines() if "GPU-hours" in line]
    assert (
        not line.startswith("0.0 days")
        and "(0.0 without" not in line
        and " 0 GPU-hours" not in line
    ), line


def test_recomputation_that_saves_nothing_is_not_ranked() -> None:
    """Fused attention keeps little beside its output: recomputing it holds the fused projection's
    storage instead.
    """
    layout = (
        "--set",
        "parallel.tensor_parallel_size=4",
        "--set",
        "parallel.recompute=[none,selective]",
    )
    answer = hp_tool("recommend", *LLAMA, *LOAD[:4], *layout, "--top", "50", "--json")
    rows = json.loads(answer.stdout)["recommendations"]
    assert rows and all(row["parallel"]["recompute"] == "none" for row in rows)
