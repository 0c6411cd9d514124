"""`objective: min_gpus` for serving against asking about every number of devices one by one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.command_line import hp_tool

MODELS = ("qwen3-32b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-30b-a3b", "deepseek-v3")


def legal_counts(most: int, node: int) -> list[int]:
    """Equal shares of a node, whole nodes, and all there is."""
    shares = [n for n in range(1, node + 1) if node % n == 0]
    return sorted({n for n in (*shares, *range(node, most, node)) if n < most} | {most})


def query(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    most = draw.choice((24, 40, 48, 56))
    load = draw.choice(
        (
            {"concurrency": draw.choice((200, 1200, 3000))},
            {"request_rate_per_second": draw.choice((2.0, 12.0, 18.0, 30.0))},
            {"concurrency": 1500, "think_time_s": 5.0},
        )
    )
    targets = draw.choice(
        ({"tpot_s": 0.02}, {"tpot_s": 0.05, "ttft_s": 2.0}, {"ttft_p90_s": 0.8}, {})
    )
    parallel = draw.choice(
        (
            {},
            {},
            {"tensor_parallel_size": draw.choice((2, 3, 4, 8))},
            {"pipeline_parallel_size": [1, 3]},
        )
    )
    return {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": most, "gpus_per_node": 8},
        "inference": {
            "input_length": 1500,
            "output_length": 200,
            "precision": "fp8",
            "engine": "sglang",
        }
        | load,
        "targets": targets,
        "parallel": parallel,
    }


def passes(asked: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether a ranked row is acceptable for `min_gpus`: all requests run at once, or a
    target limits their wait. In the mean over a load that fluctuates slightly fewer run.
    """
    in_flight = asked["inference"].get("concurrency", 0)
    return (
        any("ttft" in name for name in asked["targets"])
        or row["estimate"]["running_requests"] >= 0.99 * in_flight
    )


@pytest.mark.parametrize(
    "seeds",
    [
        (1, 3, 21),
        pytest.param((0, 1, 3, 21), marks=pytest.mark.components),
        pytest.param(range(12, 24), marks=pytest.mark.long),
    ],
    ids=len,
)
def test_it_is_the_smallest_number_on_which_anything_passes(seeds: Sequence[int]) -> None:
    queries = [query(seed) for seed in seeds]
    lines = [
        one | {"id": f"{place} fewest", "objective": "min_gpus"}
        for place, one in enumerate(queries)
    ]
    for place, one in enumerate(queries):
        cluster = one["cluster"]
        for count in legal_counts(cluster["num_gpus"], cluster["gpus_per_node"]):
            lines.append(one | {"id": f"{place} {count}", "cluster": cluster | {"num_gpus": count}})
    done = hp_tool(
        "batch", "-", "--task=recommend", "--top=1000", stdin="\n".join(map(json.dumps, lines))
    )
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    fewest: list[int] = []
    for place, one in enumerate(queries):
        counts = legal_counts(one["cluster"]["num_gpus"], 8)
        passing = [
            count
            for count in counts
            if any(
                passes(one, row) for row in answers[f"{place} {count}"].get("recommendations", ())
            )
        ]
        rows = answers[f"{place} fewest"].get("recommendations")
        assert bool(rows) == bool(passing), one
        if passing:
            assert rows[0]["estimate"]["provenance"]["num_gpus"] == passing[0], one
            fewest += [passing[0]]
    assert any(count & (count - 1) for count in fewest)  # halving would miss these


def test_three_nodes_are_fewer_than_four() -> None:
    asked = {
        "kind": "inference",
        "model": "llama-3.1-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32, "gpus_per_node": 8},
        "inference": {"input_length": 2000, "output_length": 300, "request_rate_per_second": 18.0},
        "targets": {"tpot_s": 0.04, "ttft_s": 2.0},
        "objective": "min_gpus",
    }
    done = hp_tool("recommend", "-", "--json", stdin=json.dumps(asked))
    used = json.loads(done.stdout)["recommendations"][0]["estimate"]["provenance"]["num_gpus"]
    assert used == 24
