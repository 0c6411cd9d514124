"""`python -m benchmarks.speed.machines [--json]`: one question over 30 types of machine in 8
numbers each, against as many single questions; then the question with three prices for each type,
whose equal machines are ranked once.
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


def machine(number: int, *, price: float = PRICES[0]) -> dict[str, Any]:
    """A server of its own kind: H100 with another network."""
    return {
        "gpu": "h100-sxm-80gb",
        "inter_node_bandwidth_bytes_per_second": 10.0e9 + 1.0e9 * number,
        "price_per_gpu_hour": price,
        "num_gpus": list(COUNTS),
    }


def question(cluster: Any) -> Any:
    """A training of one model, whose parallelism varies little."""
    return parse_query(
        {
            "kind": "training",
            "model": "llama-3-8b",
            "cluster": cluster,
            "training": {"sequence_length": 4096, "global_batch_size": 384, "total_tokens": 1e11},
            "parallel": {"pipeline_parallel_size": 1, "context_parallel_size": 1},
        }
    )


def measured() -> dict[str, float]:
    """Processor seconds of single questions, of all in one, and of all with three prices; and the
    ratios.
    """
    types = range(TYPES)

    def alone() -> None:
        for number in types:
            for count in COUNTS:
                answer_recommend(question({**machine(number), "num_gpus": count}), top=1)

    together = question([machine(number) for number in types])
    priced = question([machine(number, price=price) for number in types for price in PRICES])
    singles_s = cpu_seconds(alone, repeats=1)["best"]
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
    result = measured()
    print(
        json.dumps(result)
        if as_json
        else "\n".join(f"{name:28} {value:.2f}" for name, value in result.items())
    )
