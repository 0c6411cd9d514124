"""`python -m benchmarks.speed.machines [--json]`: measure a ranking over many machines.

One query over 30 types of machine, each in 8 sizes, is compared with 240 queries of one machine
each. A third query has three prices for each type; layouts of equal machines are ranked once.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.speed.measure import cpu_seconds
from hp_tool.questions.answers import answer_recommend
from hp_tool.questions.schema import parse_query

TYPES = 30
COUNTS = (8, 16, 24, 32, 48, 64, 96, 128)
PRICES = (2.0, 3.0, 4.0)


def machine_type(number: int, *, price: float = PRICES[0]) -> dict[str, Any]:
    """Return an H100 server whose network bandwidth depends on `number`."""
    return {
        "gpu": "h100-sxm-80gb",
        "inter_node_bandwidth_bytes_per_second": 10.0e9 + 1.0e9 * number,
        "price_per_gpu_hour": price,
        "num_gpus": list(COUNTS),
    }


def training_query(cluster: Any) -> Any:
    """Return a training query of one model with few layouts."""
    return parse_query(
        {
            "kind": "training",
            "model": "llama-3-8b",
            "cluster": cluster,
            "training": {"sequence_length": 4096, "global_batch_size": 384, "total_tokens": 1e11},
            "parallel": {"pipeline_parallel_size": 1, "context_parallel_size": 1},
        }
    )


def measure_rankings() -> dict[str, float]:
    """Return the processor seconds of the single queries, of the query over all machines, and of
    that with three prices, with their ratios.
    """
    types = range(TYPES)

    def rank_one_by_one() -> None:
        for number in types:
            for count in COUNTS:
                answer_recommend(training_query({**machine_type(number), "num_gpus": count}), top=1)

    together = training_query([machine_type(number) for number in types])
    priced = training_query(
        [machine_type(number, price=price) for number in types for price in PRICES]
    )
    singles_s = cpu_seconds(rank_one_by_one, repeats=1)["best"]
    one_s = cpu_seconds(lambda: answer_recommend(together, top=10), repeats=1)["best"]
    prices_s = cpu_seconds(lambda: answer_recommend(priced, top=10), repeats=1)["best"]
    return {
        "singles_s": singles_s,
        "together_s": one_s,
        "three_prices_s": prices_s,
        "together_over_singles": one_s / singles_s,
        "three_prices_over_singles": prices_s / singles_s,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    result = measure_rankings()
    print(
        json.dumps(result)
        if as_json
        else "\n".join(f"{name:28} {value:.2f}" for name, value in result.items())
    )
