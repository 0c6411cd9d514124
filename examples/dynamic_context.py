"""Compare static with dynamic context parallelism for sequences of unequal length.

    python examples/dynamic_context.py

The model is Llama 2 13B on 128 H100 with packed rows of 131,072 tokens. The baseline uses CP 8 for
every sequence. Dynamic context parallelism uses the smallest sufficient group for each sequence.
The gains are predicted upper bounds (docs/lengths.md). If all sequences are long, there is no gain.
"""

from __future__ import annotations

from hp_tool import catalog
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.catalog.lengths import sequence_lengths
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.lengths.dynamic import (
    ContextComparison,
    MicroBatchClock,
    compare_context_parallelism,
)
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload


def figures() -> dict[str, ContextComparison]:
    """Return static and dynamic seconds per step for each length distribution."""
    machine = catalog.cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=128))
    clock = MicroBatchClock(
        case=TrainingCase(
            model=catalog.model("llama-2-13b"),
            cluster=machine,
            profile=efficiency_profile(gpu=machine.gpu, framework="megatron-core"),
            workload=TrainingWorkload(sequence_length=131_072, global_batch_size=64),
        ),
        config=ParallelConfig(
            tensor_parallel_size=2,
            pipeline_parallel_size=4,
            context_parallel_size=8,
            data_parallel_size=2,
            sequence_parallel=True,
            recompute="full",
        ),
    )
    names = ("synthetic-web-text", "synthetic-long-sft", "full-rows")
    return {
        name: compare_context_parallelism(clock=clock, distribution=sequence_lengths(name))
        for name in names
    }


def main() -> None:
    for name, found in figures().items():
        shares = ", ".join(f"CP {size} {share:.0%}" for size, share in found.token_share.items())
        print(
            f"{name:20} {found.balanced_s:6.2f} s -> {found.dynamic_s:6.2f} s, {found.gain:.2f}x; "
            f"tokens by size: {shares}"
        )


if __name__ == "__main__":
    main()
