"""Rank layouts for Llama 3 70B on 64 H100, and print the step time of the best layout by part.

python examples/llama_70b_on_64_h100.py
"""

from __future__ import annotations

import hp_tool


def figures() -> hp_tool.RecommendAnswer:
    """Return the five best configurations."""
    return hp_tool.recommend(
        model="llama-3-70b",
        gpu="h100-sxm-80gb",
        num_gpus=64,
        sequence_length=8192,
        global_batch_size=128,
        total_tokens=100e9,
        top=5,
    )


def main() -> None:
    answer = figures()
    for row in answer.recommendations:
        assert isinstance(row, hp_tool.Recommendation) and row.estimate.mfu
        p = row.parallel
        print(
            f"{row.rank}. TP {p.tensor_parallel_size} PP {p.pipeline_parallel_size} x "
            f"{p.virtual_pipeline_parallel_size} "
            f"CP {p.context_parallel_size} DP {p.data_parallel_size}, micro-batch "
            f"{p.micro_batch_size}, {p.recompute}: "
            f"MFU {row.estimate.mfu:.1%}, {row.estimate.days:.1f} days"
        )
    best = answer.recommendations[0]
    assert isinstance(best, hp_tool.Recommendation) and best.estimate.time
    for part, seconds in best.estimate.time.parts_s.items():
        if seconds:
            print(f"   {part:18} {seconds:6.3f} s")


if __name__ == "__main__":
    main()
