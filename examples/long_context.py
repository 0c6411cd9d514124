"""Llama 3 8B on 128 H100, from 8 thousand to 128 thousand tokens a sequence: how much context
parallelism each length wants.

    python examples/long_context.py

Each step has the same 4 Mi tokens. MFU counts full attention, twice what a causal kernel computes,
so it rises with the length; compare tokens a second.
"""

from __future__ import annotations

import hp_tool

TOKENS_A_STEP = 1 << 22


def figures() -> dict[int, hp_tool.Recommendation]:
    """The fastest configuration of each sequence length."""
    best = {}
    for length in (8192, 32768, 131072):
        answer = hp_tool.recommend(
            model="llama-3-8b",
            gpu="h100-sxm-80gb",
            num_gpus=128,
            sequence_length=length,
            global_batch_size=TOKENS_A_STEP // length,
            parallel={"context_parallel_size": [1, 2, 4, 8, 16]},
            top=1,
        )
        (best[length],) = (
            row for row in answer.recommendations if isinstance(row, hp_tool.Recommendation)
        )
    return best


def main() -> None:
    for length, row in figures().items():
        p = row.parallel
        print(
            f"{length:7,} tokens: CP {p.context_parallel_size} TP {p.tensor_parallel_size} PP "
            f"{p.pipeline_parallel_size} "
            f"DP {p.data_parallel_size}, {p.recompute}: "
            f"{row.estimate.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
        )


if __name__ == "__main__":
    main()
