"""`python -m benchmarks.speed.events [--json]`: measure the event simulation and the fluid model of
serving, and the difference of their results.

An event simulation has 10,000 requests, whose lengths are uniform up to twice the mean. The fluid
model screens 200 configurations under 100,000 arrivals. The results are compared under the same
Poisson arrivals of equal lengths, at three fractions of a configuration's capacity.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import serving_costs
from hp_tool.cost.serving.events import simulate_requests
from hp_tool.cost.serving.fluid import simulate_flow
from hp_tool.cost.serving.load import without_waves
from hp_tool.cost.serving.passes import pass_table
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions.schema import parse_query
from hp_tool.questions.serving.problem import ServingProblem, resolve_serving

REQUESTS, SCREENED, ARRIVALS, STEPS = 10_000, 200, 100_000, 4_000
LIMITS = {"events_s": 2.0, "fluid_s": 10.0}
ENGINES = ("vllm", "sglang", "trtllm")
LENGTHS = ((1024, 128), (1024, 1024), (8192, 1024))
SHARES = (0.3, 0.6, 0.85)


def replica_problem(
    engine: str, inputs: int, outputs: int, *, tensor: int
) -> tuple[ServingProblem, ServingCandidates]:
    """Return the problem of one replica of a 70B model, and its configuration."""
    load = {
        "input_length": inputs,
        "output_length": outputs,
        "concurrency": 1,
        "precision": "fp8",
        "engine": engine,
    }
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": tensor}
    resolved = resolve_serving(
        parse_query(
            {"kind": "inference", "model": "llama-3-70b", "cluster": cluster, "inference": load}
        )
    )
    config = ServingConfig(tensor_parallel_size=tensor, max_num_seqs=256)
    return resolved, ServingCandidates.from_configs([config], concurrency=[1])


def time_simulations() -> dict[str, float]:
    """Return the seconds of simulating REQUESTS requests, by engine and concurrency."""
    rng = np.random.default_rng(0)
    seconds = {}
    for engine in ENGINES:
        case, one = replica_problem(engine, 2000, 500, tensor=4)
        inputs, outputs = rng.integers(1, 4000, REQUESTS), rng.integers(1, 1000, REQUESTS)
        for concurrency in (4, 64, 256):
            start = time.perf_counter()
            table = pass_table(case=case, candidates=one)
            simulate_requests(
                table=table, input_tokens=inputs, output_tokens=outputs, concurrency=concurrency
            )
            seconds[f"{engine}, {concurrency} at once"] = time.perf_counter() - start
    return seconds


def time_fluid_model() -> float:
    """Return the seconds of screening SCREENED configurations under ARRIVALS arrivals."""
    case, _ = replica_problem("vllm", 2000, 500, tensor=8)
    configs = [
        ServingConfig(tensor_parallel_size=t, data_parallel_size=8 // t, max_num_seqs=8 * n)
        for t in (1, 2, 4, 8)
        for n in range(1, 51)
    ]
    rows = ServingCandidates.from_configs(configs[:SCREENED], concurrency=[1] * SCREENED)
    arrivals = np.random.default_rng(1).poisson(ARRIVALS / STEPS, STEPS).astype(np.float64)
    start = time.perf_counter()
    simulate_flow(case=case, candidates=rows, arrivals=arrivals, step_s=1.0)
    return time.perf_counter() - start


def compare_models() -> dict[str, dict[str, Any]]:
    """Return fluid / events - 1 of each figure: for every load, its median size, its worst value,
    and the load of that value (`at`).
    """
    ratios: dict[str, dict[str, float]] = {"ttft_s": {}, "tpot_s": {}, "in_flight": {}}
    rng, n = np.random.default_rng(2), 5000
    for engine in ENGINES:
        for inputs, outputs in LENGTHS:
            for tensor in (2, 8):
                case, one = replica_problem(engine, inputs, outputs, tensor=tensor)
                full = serving_costs(
                    case=without_waves(case), candidates=one.with_concurrency(np.array([256.0]))
                )
                capacity = 256.0 / float(full.request_latency_s[0])
                table = pass_table(case=case, candidates=one)
                for share in SHARES:
                    arrivals = np.cumsum(rng.exponential(1.0 / (share * capacity), n))
                    events = simulate_requests(
                        table=table,
                        input_tokens=np.full(n, inputs),
                        output_tokens=np.full(n, outputs),
                        arrival_s=arrivals,
                    )
                    counts = np.histogram(arrivals, bins=STEPS, range=(0.0, arrivals[-1]))[
                        0
                    ].astype(np.float64)
                    fluid = simulate_flow(
                        case=case, candidates=one, arrivals=counts, step_s=arrivals[-1] / STEPS
                    )
                    before_end = np.minimum(events.finish_s, arrivals[-1]) - events.arrival_s
                    exact = {
                        "ttft_s": events.ttft_s.mean(),
                        "tpot_s": events.tpot_s.mean(),
                        "in_flight": before_end.sum() / arrivals[-1],
                    }
                    for name, value in exact.items():
                        load = (
                            f"{engine}, {inputs} in, {outputs} out, TP {tensor}, {share:.0%} of "
                            "capacity"
                        )
                        ratios[name][load] = float(getattr(fluid, name)[0]) / float(value) - 1.0
    return {name: _summary(loads) for name, loads in ratios.items()}


def _summary(loads: dict[str, float]) -> dict[str, Any]:
    at = max(loads, key=lambda load: abs(loads[load]))
    return {
        "median": float(np.median(np.abs(list(loads.values())))),
        "worst": loads[at],
        "at": at,
        "loads": loads,
    }


def evaluate() -> dict[str, Any]:
    """Return all measurements, and whether both limits are met."""
    events, fluid = time_simulations(), time_fluid_model()
    within = max(events.values()) <= LIMITS["events_s"] and fluid <= LIMITS["fluid_s"]
    return {
        "events_s": events,
        "fluid_s": fluid,
        "within_limits": within,
        "disagreement": compare_models(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.events", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    report = evaluate()
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    slowest, longest = max(report["events_s"].items(), key=lambda item: item[1])
    print(
        f"event simulation of {REQUESTS:,} requests: at most {longest:.2f} s ({slowest}); limit "
        f"{LIMITS['events_s']:.0f}"
    )
    seconds = report["fluid_s"]
    print(
        f"fluid model of {SCREENED} configurations under {ARRIVALS:,} arrivals: {seconds:.2f} s; "
        f"limit {LIMITS['fluid_s']:.0f}"
    )
    for name, row in report["disagreement"].items():
        print(
            f"difference of both in {name}: median {row['median']:.1%}, worst {row['worst']:+.1%} "
            f"({row['at']})"
        )


if __name__ == "__main__":
    main()
