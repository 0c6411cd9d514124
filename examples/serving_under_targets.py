"""Rank layouts for serving Qwen3 32B on 8 H200 with 64 requests in flight, with targets for TTFT
and TPOT.

python examples/serving_under_targets.py
"""

from __future__ import annotations

import hp_tool

TARGETS = {"ttft_s": 1.0, "tpot_s": 0.02}


def figures() -> hp_tool.RecommendAnswer:
    """Return the three best configurations that meet the targets, and the number of rejections."""
    return hp_tool.recommend(
        model="qwen3-32b",
        gpu="h200-sxm-141gb",
        num_gpus=8,
        targets=TARGETS,
        top=3,
        inference={
            "input_length": 4000,
            "output_length": 1000,
            "concurrency": 64,
            "engine": "vllm",
        },
    )


def main() -> None:
    answer = figures()
    for row in answer.recommendations:
        assert isinstance(row, hp_tool.ServingRecommendation)
        p, e = row.parallel, row.estimate
        print(
            f"{row.rank}. TP {p.tensor_parallel_size} PP {p.pipeline_parallel_size}, {e.replicas} "
            "replicas: "
            f"TTFT {e.ttft_s:.2f} s, TPOT {1e3 * (e.tpot_s or 0.0):.1f} ms, "
            f"{e.output_tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
        )
    print(f"rejected: {answer.rejections}")


if __name__ == "__main__":
    main()
