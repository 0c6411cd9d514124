"""Queries as people and programs write numbers: 2000.0 is the whole number 2000 wherever one is
asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
TRAINING: dict[str, Any] = {
    "kind": "training",
    "model": {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    },
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16, "gpus_per_node": 8},
    "training": {"sequence_length": 2000, "global_batch_size": 64, "framework_version": "26.06"},
    "parallel": {
        "tensor_parallel_size": 2,
        "micro_batch_size": 1,
        "recompute": {"granularity": "full", "method": "uniform", "num_layers": 2},
        "zero_stage": 1,
    },
}
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "llama-3.1-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2},
    "inference": {
        "input_length": 2000,
        "output_length": 200,
        "concurrency": 32,
        "speculative": {"num_speculative_tokens": 3, "acceptance_rate": 0.7},
    },
    "parallel": {"tensor_parallel_size": 2},
}


def as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_floats(each) for key, each in value.items()}
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize("query", [TRAINING, SERVING], ids=["training", "serving"])
@pytest.mark.parametrize("task", ["estimate", "batch"])
def test_whole_numbers_may_be_written_with_a_point(
    entry_point: Run, query: dict[str, Any], task: str
) -> None:
    def estimate(asked: dict[str, Any]) -> Any:
        return json.loads(
            entry_point(
                task, "-", *(("--json",) if task == "estimate" else ()), stdin=json.dumps(asked)
            ).stdout
        )

    plain, pointed = estimate(query), estimate(as_floats(query))
    assert plain["status"] == "ok"
    assert pointed == plain


def test_lists_flags_and_settings_take_them_too(entry_point: Run) -> None:
    listed = TRAINING | {"parallel": {"tensor_parallel_size": [2.0, 4.0], "micro_batch_size": 1.0}}
    found = entry_point(
        "recommend",
        "-",
        "--json",
        "--num-gpus=32.0",
        "--set=training.sequence_length=4096.0",
        stdin=json.dumps(listed),
    )
    assert found.returncode == 0, found.stderr
    sizes = {
        row["parallel"]["tensor_parallel_size"]
        for row in json.loads(found.stdout)["recommendations"]
    }
    assert sizes == {2, 4}


@pytest.mark.parametrize(
    ("query", "setting", "field"),
    [
        (TRAINING, "training.sequence_length=2000.5", "training.sequence_length"),
        (SERVING, "inference.concurrency=1.5", "inference.concurrency"),
        (TRAINING, "parallel.recompute.num_layers=1.5", "parallel.recompute.num_layers"),
    ],
)
def test_a_fraction_is_refused_where_a_whole_number_is_asked_for(
    entry_point: Run, query: dict[str, Any], setting: str, field: str
) -> None:
    found = entry_point("estimate", "-", f"--set={setting}", stdin=json.dumps(as_floats(query)))
    assert found.returncode == 2
    assert field in found.stderr and setting.partition("=")[2] in found.stderr


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize(
    ("query", "field"),
    [(TRAINING, "training.framework_version"), (SERVING, "inference.engine_version")],
)
def test_an_empty_release_is_refused(
    entry_point: Run, query: dict[str, Any], field: str, text: str
) -> None:
    section, _, name = field.partition(".")
    found = entry_point(
        "estimate", "-", stdin=json.dumps(query | {section: query[section] | {name: text}})
    )
    assert found.returncode == 2
    assert f"{field} is empty" in found.stderr
