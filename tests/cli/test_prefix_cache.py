"""A prefix cache takes prefill off the devices, however the query says its load."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
N = 120
LENGTHS = {"input_length": 4000, "output_length": 200}
COLUMNS = {"input_tokens": [3000, 5000] * (N // 2), "output_tokens": [200] * N}
ARRIVALS = {"arrival_s": [0.1 * k for k in range(N)]}
LOADS: dict[str, dict[str, Any]] = {
    "closed": LENGTHS | {"concurrency": 64},
    "rate": LENGTHS | {"request_rate_per_second": 10.0},
    "offline": LENGTHS | {"load": {"arrival": "offline", "num_prompts": 500}},
    "thinking": LENGTHS | {"concurrency": 64, "think_time_s": 3.0},
    "trace": {"trace": COLUMNS | ARRIVALS},
    "trace at a rate": {"trace": COLUMNS | ARRIVALS, "request_rate_per_second": 12.0},
    "trace with lengths beside it": LENGTHS | {"trace": COLUMNS | ARRIVALS},
    "lengths alone": {"trace": COLUMNS, "concurrency": 64},
    "drawn lengths": {
        "trace": {
            "input_tokens": {"median": 4000.0, "sigma": 0.5},
            "output_tokens": {"median": 200.0, "sigma": 0.3},
        },
        "concurrency": 64,
    },
}


def estimates(entry_point: Run, loads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    query = {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 4},
    }
    lines = [query | {"inference": load, "parallel": {"tensor_parallel_size": 1}} for load in loads]
    answers = entry_point("batch", "-", stdin="\n".join(map(json.dumps, lines))).stdout.splitlines()
    return [json.loads(line)["estimate"] for line in answers]


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_prompts_are_answered_sooner_and_no_fewer(entry_point: Run, load: dict[str, Any]) -> None:
    rates = (0.0, 0.4, 0.8)
    cached = estimates(entry_point, [load | {"prefix_cache_hit_rate": rate} for rate in rates])
    ttft, tpot, throughput = (
        [each[name] for each in cached]
        for name in ("ttft_s", "tpot_s", "output_tokens_per_second_per_gpu")
    )
    assert ttft[0] > 1.2 * ttft[1] and ttft[1] > 1.2 * ttft[2]
    assert (
        tpot[0] > tpot[1] > tpot[2]
    )  # passes that decode share the device with fewer prompt tokens
    assert throughput[0] <= throughput[1] <= throughput[2]


def test_a_rate_is_worth_what_the_same_tokens_of_a_trace_are(entry_point: Run) -> None:
    columns = COLUMNS | ARRIVALS
    listed = columns | {"prefix_tokens": [tokens // 4 for tokens in columns["input_tokens"]]}
    by_rate, by_column, over_column = estimates(
        entry_point,
        [
            {"trace": columns, "prefix_cache_hit_rate": 0.25},
            {"trace": listed},
            {"trace": columns | {"prefix_tokens": [1] * N}, "prefix_cache_hit_rate": 0.25},
        ],
    )
    assert by_rate == by_column == over_column
