"""An exported server runs as many requests at once as were predicted to fit: `recommend`, `export`,
`import`, `estimate`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.formats.test_exported_words import exported, imported, run

LOADS: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({"request_rate_per_second": 8.0}, {"ttft_p99_s": 5.0, "tpot_s": 0.05}),
    ({"concurrency": 64}, {"tpot_s": 0.05}),
    ({}, {"tpot_s": 0.03}),
]
"""Loads and targets; the last asks for the highest load."""
OTHERS = [(engine, *LOADS[place]) for engine, place in (("sglang", 0), ("vllm", 1), ("sglang", 2))]
CASES = [
    *((engine, *LOADS[place]) for engine, place in (("vllm", 0), ("sglang", 1), ("vllm", 2))),
    *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS),
]


@pytest.mark.parametrize(("engine", "load", "targets"), CASES)
def test_the_exported_server_is_the_predicted_one(
    engine: str, load: dict[str, Any], targets: dict[str, float]
) -> None:
    inference = {
        "input_length": 2000,
        "output_length": 400,
        "engine": engine,
        "precision": "fp8",
    } | load
    query = {
        "kind": "inference",
        "model": "qwen3-32b",
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
        "inference": inference,
        "targets": targets,
    }
    ran = run("recommend", "-", "--json", "--top", "3", content=query)
    assert ran.returncode == 0, ran.stderr
    row = json.loads(ran.stdout)["recommendations"][0]
    expected, each = (
        row["estimate"],
        row["estimate"]["concurrency"] / row["parallel"]["data_parallel_size"],
    )
    read = imported(
        exported(ran.stdout, engine),
        "--gpu",
        "h200-sxm-141gb",
        "--num-gpus",
        "8",
        "--set",
        "inference.input_length=2000",
        "--set",
        "inference.output_length=400",
    )
    # Independent requests in flight are Poisson's: one in a hundred times there are this many at
    # one scheduler.
    assert read["parallel"]["max_num_seqs"] >= each + 2.33 * math.sqrt(each)
    again = {**read, "inference": read["inference"] | load, "targets": targets}
    estimate = json.loads(run("estimate", "-", "--json", content=again).stdout)["estimate"]
    for name in ("ttft_s", "tpot_s", "request_latency_s", "output_tokens_per_second_per_gpu"):
        assert estimate[name] == pytest.approx(expected[name], rel=1e-9)
    assert estimate["memory"]["total_bytes"] == pytest.approx(
        expected["memory"]["total_bytes"], rel=1e-9
    )
    assert estimate["tails"] == expected["tails"]
