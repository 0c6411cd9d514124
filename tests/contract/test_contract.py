"""What a release promises to keep (docs/versions.md): commands with their options, and the keys of
answers, are kept as files.

`python -m tests.contract.test_contract` writes them anew, for a release that may take something
away.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import hp_tool
from hp_tool.cli.main import build
from hp_tool.errors import InputError
from hp_tool.questions import schema

HERE = Path(__file__).parent
CLUSTER = {"gpu": "h100-sxm-80gb", "num_gpus": 16}
TRAINING: dict[str, Any] = {
    "id": "training",
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": CLUSTER,
    "training": {"sequence_length": 8192, "global_batch_size": 64, "total_tokens": 1e10},
}
SERVING: dict[str, Any] = {
    "id": "serving",
    "kind": "inference",
    "model": "llama-3-8b",
    "cluster": CLUSTER,
    "inference": {"input_length": 2000, "output_length": 500},
    "targets": {"ttft_s": 1.0, "tpot_s": 0.05},
}


def answers() -> dict[str, object]:
    """Return an answer of each kind as JSON has it."""
    layout = {"parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}}
    with pytest.raises(InputError) as refused:
        hp_tool.estimate(TRAINING | {"modle": "x"})
    replies = {
        "estimate": hp_tool.estimate(TRAINING | layout),
        "estimate that does not fit": hp_tool.estimate(TRAINING | {"model": "gpt3-175b"} | layout),
        "estimate of serving": hp_tool.estimate(
            SERVING | {"parallel": {"tensor_parallel_size": 2}}
        ),
        "recommend": hp_tool.recommend(TRAINING, top=2, pareto="memory"),
        "recommend serving": hp_tool.recommend(SERVING, top=2),
        "size": hp_tool.size(gpu="h100-sxm-80gb", num_gpus=64, days=30.0),
        "export": hp_tool.export(TRAINING | layout, format="megatron-lm"),
    }
    return {name: schema.to_dict(reply) for name, reply in replies.items()} | {
        "error": refused.value.as_dict()
    }


def keys(value: object, path: str = "") -> Iterator[str]:
    """Yield the path of every key; elements of lists stand for each other. What `query` holds is
    the caller's.
    """
    if isinstance(value, dict) and path != "query":
        for name, each in value.items():
            below = f"{path}.{name}".removeprefix(".")
            yield below
            yield from keys(each, below)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from keys(each, f"{path}[]")


def options(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield each command with its options."""
    for name, child in getattr(node, "commands", {}).items():
        yield from options(child, (*path, name))
    if not hasattr(node, "commands"):
        yield (
            " ".join(path),
            sorted(
                flag
                for each in node.params
                for flag in (*each.opts, *each.secondary_opts)
                if flag[0] == "-"
            ),
        )


def today() -> dict[str, dict[str, list[str]]]:
    """Return what answers and commands have."""
    return {
        "answers.json": {name: sorted({*keys(answer)}) for name, answer in answers().items()},
        "commands.json": dict(options(typer.main.get_command(build()))),
    }


@pytest.mark.parametrize("file", ["answers.json", "commands.json"])
def test_nothing_that_was_promised_is_gone(file: str) -> None:
    kept: dict[str, list[str]] = json.loads((HERE / file).read_text())
    has = today()[file]
    gone = {
        name: lost
        for name, wanted in kept.items()
        if (lost := sorted({*wanted} - {*has.get(name, ())})) or name not in has
    }
    assert not gone, "kept until a release may take it away (docs/versions.md)"


def test_a_lost_key_is_seen() -> None:
    assert [*keys({"a": [{"b": 1}], "query": {"c": 2}})] == ["a", "a[].b", "query"]
    assert "--json" in dict(options(typer.main.get_command(build())))["estimate"]


if __name__ == "__main__":
    for name, content in today().items():
        (HERE / name).write_text(json.dumps(content, indent=1) + "\n")
