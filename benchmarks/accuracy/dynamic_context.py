"""Compare the predicted gain of dynamic over static context parallelism with the best published
gain: `python -m benchmarks.accuracy.dynamic_context [--lengths NAME_OR_FILE ...] [--json]`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.accuracy.tables import as_text
from hp_tool.catalog import cluster, model, names
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.catalog.lengths import sequence_lengths
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.lengths.dynamic import MicroBatchClock, compare_context_parallelism
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import OwnFile
from hp_tool.domain.workload import TrainingWorkload

MODEL, GPU, GPUS = "llama-2-13b", "h100-sxm-80gb", 128
WORKLOAD = TrainingWorkload(sequence_length=131_072, global_batch_size=64)
SCENARIOS = {
    "CP groups over two servers": ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        context_parallel_size=8,
        data_parallel_size=2,
        sequence_parallel=True,
        recompute="full",
    ),
    "CP groups inside one server": ParallelConfig(
        tensor_parallel_size=1,
        pipeline_parallel_size=8,
        context_parallel_size=8,
        data_parallel_size=2,
        recompute="full",
    ),
}
PUBLISHED_BEST = 1.48
"""Best published gains, relative to packing alone. From NVIDIA's technical blog on dynamic context
parallelism in Megatron Core, 2026: "up to", on data sets and clusters that are not fully described.
Nothing is fitted to these values.
"""


def micro_batch_clock(config: ParallelConfig) -> MicroBatchClock:
    """Return the clock that times rows of a configuration with the benchmark's fixed model and
    cluster.
    """
    machine = cluster(ClusterQuery(gpu=GPU, num_gpus=GPUS))
    return MicroBatchClock(
        case=TrainingCase(
            model=model(MODEL),
            cluster=machine,
            workload=WORKLOAD,
            profile=efficiency_profile(gpu=machine.gpu, framework="megatron-core"),
        ),
        config=config,
    )


def evaluate(names: list[str]) -> dict[str, Any]:
    """Return {setting, published_best, scenarios: [{name, fits, rows}]}: seconds per step and gains
    for each distribution.
    """
    scenarios = []
    for name, config in SCENARIOS.items():
        timer = micro_batch_clock(config)
        static = training_costs(case=timer.case, candidates=Candidates.alone(config))
        sizes = (
            f"TP {config.tensor_parallel_size}, PP {config.pipeline_parallel_size}, CP "
            f"{config.context_parallel_size}, "
        )
        scenarios.append(
            {
                "name": f"{name}: {sizes}DP {config.data_parallel_size}",
                "fits": bool(static.feasible),
                "rows": [_row(one, timer) for one in names],
            }
        )
    return {
        "setting": f"{MODEL}, {GPUS} x {GPU}, {WORKLOAD.global_batch_size} rows of "
        f"{WORKLOAD.sequence_length:,} tokens, "
        "full recomputation",
        "published_best": PUBLISHED_BEST,
        "scenarios": scenarios,
    }


def _row(name: str, timer: MicroBatchClock) -> dict[str, Any]:
    distribution = sequence_lengths(OwnFile(name))
    gains = compare_context_parallelism(clock=timer, distribution=distribution)
    return {
        "lengths": distribution.name,
        "mean_tokens": distribution.cut(WORKLOAD.sequence_length).mean,
        "packed_s": gains.packed_s,
        "balanced_s": gains.balanced_s,
        "dynamic_s": gains.dynamic_s,
        "gain": gains.gain,
        "gain_over_packing": gains.gain_over_packing,
        "token_share": gains.token_share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.dynamic_context", description=__doc__
    )
    parser.add_argument("--lengths", nargs="+", default=names("lengths"), metavar="NAME_OR_FILE")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    report = evaluate(arguments.lengths)
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))


if __name__ == "__main__":
    main()
