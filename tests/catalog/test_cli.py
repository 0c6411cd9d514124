"""`hp-tool models|gpus|clusters`: lists, one name, and JSON that is valid input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hp_tool import catalog
from hp_tool.cli.catalog import clusters, gpus, models
from hp_tool.errors import NotFoundError

app = typer.Typer()
for command in (models, gpus, clusters):
    app.command()(command)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("models", catalog.names("models")),
        ("gpus", catalog.names("gpus")),
        ("clusters", catalog.names("clusters")),
    ],
)
def test_lists_name_everything(command: str, names: list[str]) -> None:
    listed = [line.split()[0] for line in run(command).splitlines()[1:] if line[:1].strip()]
    assert listed == names
    assert [item["name"] for item in json.loads(run(command, "--json"))["items"]] == names


def test_one_model_says_where_it_comes_from() -> None:
    shown = run("models", "meta-llama/Llama-3.1-8B")
    assert "arXiv 2407.21783" in shown
    assert "14336" in shown


def test_json_of_one_name_is_valid_input(tmp_path: Path) -> None:
    for name in ("gpt3-175b", "deepseek-v3", "t5-11b"):
        assert catalog.model_from_mapping(
            json.loads(run("models", name, "--json"))
        ) == catalog.model(name)
    assert (
        json.loads(run("gpus", "h100", "--json"))["memory_bytes"]
        == catalog.gpu("h100-sxm-80gb").memory_bytes
    )
    assert json.loads(run("clusters", "dgx-h100", "--json"))["gpu"] == "h100-sxm-80gb"


def test_a_models_own_file_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(
        '{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}'
    )
    assert "512" in run("models", str(path))


def test_an_unknown_name_is_left_to_the_entry_point() -> None:
    with pytest.raises(NotFoundError, match="did you mean"):
        run("gpus", "h101")


def test_rates_of_gpus_stand_in_teraflops_and_are_left_out_where_there_are_none() -> None:
    """H100 SXM: 989.4 TFLOP/s in bf16, 1979 in fp8. An A100 has no fp8."""
    head, *rows = run("gpus").splitlines()
    ends = {name: head.index(name) + len(name) for name in ("bf16 TFLOP/s", "fp8 TFLOP/s")}

    def cells(gpu: str) -> list[str]:
        row = next(row for row in rows if row.startswith(gpu))
        return [row[end - 8 : end].strip() for end in ends.values()]

    assert cells("h100-sxm-80gb") == ["989.4", "1979"]
    assert cells("a100-sxm-80gb") == ["312", ""]
