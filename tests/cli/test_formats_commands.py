"""export and import as people use them: processes, pipes, files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hp_tool.cli.exchange import _print_assessment
from hp_tool.formats.exchange.assessment import Assessment
from tests.cli import shown
from tests.command_line import hp_tool

SCRIPT = """#!/bin/bash
GPUS_PER_NODE=8
MODEL=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
       --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
       --untie-embeddings-and-output-weights --max-position-embeddings 8192 --vocab-size 128256)
torchrun --nproc-per-node $GPUS_PER_NODE --nnodes 4 pretrain_gpt.py ${MODEL[@]} --seq-length 8192 --bf16 \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 128 \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-distributed-optimizer \\
    --attention-dropout 0 --hidden-dropout 0
"""  # noqa: E501
LOG = "".join(
    f" iteration {i}/ 100 | elapsed time per iteration (ms): {5200 + i}.0 |\n" for i in range(1, 9)
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_is_what_i_run_any_good(script: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    ran = hp_tool("import", str(script), "--log", str(log), "--gpu", "h100-sxm-80gb", "--json")
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["query"]["cluster"]["num_gpus"] == 32
    assert answer["logged"]["step_s"] == pytest.approx(5.2055)
    assert (
        answer["gain_fraction"] > 0.2
    )  # full recomputation, unsharded norms, exposed reductions on an 8B model
    low, high = answer["gain_interval"]
    assert low < answer["gain_fraction"] < high
    assert answer["switched_on"] == ["data_parallel"]
    ours, best = (
        answer["estimate"]["time"]["step_s"],
        answer["better"]["estimate"]["time"]["step_s"],
    )
    assert sum(answer["parts_gained_s"].values()) == pytest.approx(ours - best)
    talk = hp_tool("import", str(script), "--log", str(log), "--gpu", "h100-sxm-80gb").stdout
    assert re.match(r"Measured 5\.21 s per step \(median of \d+\); predicted ", talk)
    assert f"({low:+.0%} to {high:+.0%})" in talk
    assert "Where the gain comes from" in talk


def test_the_query_of_a_command_is_valid_input(script: Path, tmp_path: Path) -> None:
    ran = hp_tool("import", str(script), "--gpu", "h100-sxm-80gb", "--query")
    assert yaml.safe_load(ran.stdout)["parallel"]["recompute"] == "full"
    path = tmp_path / "query.yaml"
    path.write_text(ran.stdout)
    assert hp_tool("estimate", str(path)).returncode == 0
    search = yaml.safe_load(
        hp_tool("import", str(script), "--gpu", "h100-sxm-80gb", "--search").stdout
    )
    assert (
        search["search"]["baseline"] == yaml.safe_load(ran.stdout)["parallel"]
        and "parallel" not in search
    )


def test_what_the_command_does_not_say_is_asked_for(script: Path) -> None:
    ran = hp_tool("import", str(script))
    assert ran.returncode == 2
    assert "cluster.gpu; add --gpu" in ran.stderr


def test_a_recommendation_is_exported_and_read_back(tmp_path: Path) -> None:
    flags = (
        "--model",
        "llama-3-8b",
        "--gpu",
        "h100-sxm-80gb",
        "--num-gpus",
        "32",
        "--sequence-length",
        "8192",
        "--global-batch-size",
        "128",
        "--top",
        "3",
        "--json",
    )
    ranked = hp_tool("recommend", *flags)
    exported = hp_tool("export", "-", "--format", "megatron-lm", "--rank", "2", stdin=ranked.stdout)
    assert exported.returncode == 0, exported.stderr
    again = hp_tool("import", "-", "--gpu", "h100-sxm-80gb", "--query", stdin=exported.stdout)
    wanted = json.loads(ranked.stdout)["recommendations"][1]["parallel"]
    found = yaml.safe_load(again.stdout)["parallel"]
    recompute = wanted["recompute"]
    wanted["recompute"] = {name: value for name, value in recompute.items() if value is not None}
    assert found.items() <= wanted.items()


def test_an_unknown_format_names_the_known() -> None:
    ran = hp_tool("export", "-", "--format", "word", stdin="{}")
    assert ran.returncode == 2
    assert "no format is named word" in ran.stderr


def test_parts_below_a_thousandth_of_the_step_are_not_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a step of 10 seconds: 10 ms and more."""
    better = replace(shown.recommendations().recommendations[0], estimate=shown.estimate(10.0))
    assessment = Assessment(
        format="megatron-lm",
        query={},
        search={},
        estimate=shown.estimate(11.0),
        logged=None,
        step_gap_fraction=None,
        better=better,
        gain_fraction=0.1,
        gain_interval=(0.05, 0.15),
        switched_on=(),
        parts_gained_s={"compute": 0.99, "data_parallel": -0.012, "optimizer": 0.008},
    )
    _print_assessment(assessment)
    table = capsys.readouterr().out.partition("Where the gain comes from")[2]
    assert re.findall(r"^\s*(\w+(?: \w+)?)\s+([+-][\d.]+)\s*$", table, re.MULTILINE) == [
        ("compute", "+0.990"),
        ("data parallel", "-0.012"),
    ]
