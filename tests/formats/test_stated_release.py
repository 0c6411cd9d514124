"""A release stands in a comment of what is written for it, and is read from there."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.formats.exchange import read_configuration
from hp_tool.formats.exchange.export import export

TRAINING: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 4096, "global_batch_size": 16, "framework_version": "0.17.1"},
    "parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1, "recompute": "none"},
}
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1},
    "inference": {
        "input_length": 1000,
        "output_length": 100,
        "concurrency": 8,
        "engine_version": "0.17.0",
    },
    "parallel": {"tensor_parallel_size": 1},
}
GIVEN = {"model": "llama-3-8b", "cluster.gpu": "h100-sxm-80gb", "cluster.num_gpus": 8}


@pytest.mark.parametrize(
    ("query", "format", "field"),
    [
        (TRAINING, "megatron-lm", "training.framework_version"),
        (TRAINING, "slurm", "training.framework_version"),
        (SERVING, "vllm", "inference.engine_version"),
    ],
)
def test_both_ways(query: dict[str, Any], format: str, field: str) -> None:
    section, name = field.split(".")
    text = export(result=query, format=format)
    reader = "megatron-lm" if format == "slurm" else format
    given = GIVEN if query is TRAINING else GIVEN | {"cluster.num_gpus": 1}
    load = (
        {
            f"inference.{each}": query["inference"][each]
            for each in ("input_length", "output_length", "concurrency")
        }
        if (query is SERVING)
        else {}
    )
    reading = read_configuration(text, format=reader, overrides=given | load)
    assert reading.query[section][name] == query[section][name]
    (read,) = [each for each in reading.read if each.field == field]
    assert read.line and query[section][name] in text.splitlines()[read.line - 1]
    unnamed = {
        **query,
        section: {key: value for key, value in query[section].items() if key != name},
    }
    silent = read_configuration(
        export(result=unnamed, format=format), format=reader, overrides=given | load
    )
    assert silent.query[section].get(name) != query[section][name] and not [
        each for each in silent.read if each.flag == "comment"
    ]


@pytest.mark.parametrize(
    ("comment", "release"),
    [
        ("# Megatron-LM: llama-3-8b on 8 x h100-sxm-80gb, megatron-core 0.15.0rc4.", "0.15.0rc4"),
        ("# llama-3-8b on 8 x h100-sxm-80gb, megatron-core 2 times", None),
        ("# llama-3-8b on 8 x h100-sxm-80gb, nemo 26.06", None),
        ("# megatron-core 0.9: fast", None),
        ('echo "8B on 8 x h100, megatron-core 0.9"', None),
    ],
)
def test_comments_of_others(comment: str, release: str | None) -> None:
    text = export(
        result={**TRAINING, "training": {"sequence_length": 4096, "global_batch_size": 16}},
        format="megatron-lm",
    )
    head, _, rest = text.partition("\n")
    reading = read_configuration(
        f"{head}\n{comment}\n{rest}", format="megatron-lm", overrides=GIVEN
    )
    assert reading.query["training"].get("framework_version") == release
