"""Find the best context-parallel size for Llama 3 8B on 128 H100 with sequences of 8,192 to 131,072
tokens.

    python examples/long_context.py

Each step has 4 Mi tokens. Compare tokens per second instead of MFU: MFU counts full attention,
which is twice the work of a causal kernel, so MFU rises with the sequence length.
"""

from __future__ import annotations

import hp_tool

TOKENS_PER_STEP = 1 << 22


def figures() -> dict[int, hp_tool.Recommendation]:
    """Return the fastest configuration for each sequence length."""
    best = {}
    for length in (8192, 32768, 131072):
        answer = hp_tool.recommend(
            model="llama-3-8b",
            gpu="h100-sxm-80gb",
            num_gpus=128,
            sequence_length=length,
            global_batch_size=TOKENS_PER_STEP // length,
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
