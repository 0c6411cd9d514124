"""Selective recomputation that keeps no less than none: the answer says so, and only then."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
DENSE = (
    "--gpu=h100-sxm-80gb",
    "--num-gpus=64",
    "--sequence-length=8192",
    "--global-batch-size=512",
)
NAMED = '{"granularity":"selective","modules":["core_attn","layernorm"]}'


def estimated(run: Run, *arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run("estimate", *arguments, "--json").stdout)["estimate"]
    return answer


@pytest.mark.parametrize(
    ("query", "recompute", "needless"),
    [
        (("--model=llama-3-8b",), "selective", True),
        (("--model=llama-3-70b", "--set=parallel.tensor_parallel_size=8"), "selective", True),
        (("--model=mixtral-8x7b", "--set=parallel.expert_parallel_size=8"), "selective", True),
        # Norms of queries and keys keep their projection anyway: a core that runs again keeps no
        # copy of the values.
        (("--model=qwen3-30b-a3b", "--set=parallel.expert_parallel_size=8"), "selective", False),
        (("--model=llama-3-8b",), NAMED, False),
        (("--model=llama-3-8b",), "full", False),
        (("--model=llama-3-8b", "--set=training.attention=unfused"), "selective", False),
        (("--model=llama-3-8b", "--set=training.framework=torch-fsdp"), "selective", False),
        (("--model=gpt3-175b", "--set=parallel.tensor_parallel_size=8"), "selective", False),
        (("--model=deepseek-v2-lite", "--set=parallel.expert_parallel_size=8"), "selective", False),
    ],
)
def test_an_answer_says_when_selective_recomputation_keeps_no_less_than_none(
    entry_point: Run, query: tuple[str, ...], recompute: str, needless: bool
) -> None:
    arguments = (*DENSE, *query)
    selective = estimated(entry_point, *arguments, f"--set=parallel.recompute={recompute}")
    none = estimated(entry_point, *arguments, "--set=parallel.recompute=none")
    kept = [each["memory"]["activations_bytes"] for each in (selective, none)]
    assert (kept[0] >= kept[1]) is needless
    assert ("recompute" in selective["provenance"]) is needless and "recompute" not in none[
        "provenance"
    ]
    if needless:
        assert selective["time"]["step_s"] > none["time"]["step_s"]
        words = " ".join(
            entry_point(
                "estimate", *arguments, f"--set=parallel.recompute={recompute}"
            ).stdout.split()
        )
        assert selective["provenance"]["recompute"] in words and "choose recompute none" in words
