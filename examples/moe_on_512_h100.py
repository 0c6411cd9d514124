"""Compare expert-parallel sizes for the MoE model Mixtral 8x22B on 512 H100.

python examples/moe_on_512_h100.py
"""

from __future__ import annotations

import hp_tool


def figures() -> dict[int, hp_tool.Recommendation]:
    """Return the fastest configuration for each expert-parallel size."""
    best = {}
    for size in (1, 2, 4, 8):
        answer = hp_tool.recommend(
            model="mixtral-8x22b",
            gpu="h100-sxm-80gb",
            num_gpus=512,
            sequence_length=8192,
            global_batch_size=1024,
            parallel={"expert_parallel_size": size},
            top=1,
        )
        for row in answer.recommendations:
            assert isinstance(row, hp_tool.Recommendation)
            best[size] = row
    return best


def main() -> None:
    for size, row in figures().items():
        p, time = row.parallel, row.estimate.time
        assert time
        print(
            f"EP {size}: TP {p.tensor_parallel_size} PP {p.pipeline_parallel_size} DP "
            f"{p.data_parallel_size} "
            f"ZeRO {p.zero_stage}, step {time.step_s:.2f} s, "
            f"{time.parts_s.get('expert_parallel', 0.0):.2f} s of it "
            f"expert communication, MFU {row.estimate.mfu:.1%}"
        )


if __name__ == "__main__":
    main()
