"""Answers made by hand, which no refit moves, as tables on screens of several widths: `python -m
tests.cli.shown` writes the files in tests/cli/rendered that test_tables.py compares with.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hp_tool.cli import search_output, serving_tables, tables
from hp_tool.domain.answer import Answer, Repeats
from hp_tool.domain.familiarity import Familiarity
from hp_tool.domain.measurement import Fidelity, Measurement, Tail, Tails
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import (
    Estimate,
    Fix,
    Intervals,
    MemoryEstimate,
    Reason,
    Recommendation,
    SpaceSummary,
    TimeEstimate,
)
from hp_tool.domain.serving import (
    InferenceEstimate,
    ServingConfig,
    ServingIntervals,
    ServingMemory,
    ServingRecommendation,
    TokenPrices,
)
from hp_tool.domain.states import SearchState
from hp_tool.domain.units import GIB
from hp_tool.loop.tuning.result import SearchSummary, TuneResult
from hp_tool.questions.answers import RecommendAnswer
from hp_tool.questions.schema import parse_query

SERVED = parse_query(
    {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
        "inference": {"input_length": 1024, "output_length": 256, "concurrency": 64},
        "targets": {"ttft_p99_s": 2.0},
    }
)
WIDTHS = (60, 80, 120, 160)
FOLDER = Path(__file__).parent / "rendered"
SPACE = SpaceSummary(legal=6_282, feasible=2_732, seconds=0.0254)
CONFIG = ParallelConfig(
    tensor_parallel_size=4,
    pipeline_parallel_size=8,
    virtual_pipeline_parallel_size=6,
    data_parallel_size=32,
    sequence_parallel=True,
    recompute="selective",
)
CONFIGS = (
    CONFIG,
    replace(
        CONFIG, virtual_pipeline_parallel_size=3, context_parallel_size=2, data_parallel_size=16
    ),
    replace(
        CONFIG, virtual_pipeline_parallel_size=1, pipeline_schedule="dualpipe-v", recompute="full"
    ),
)


def estimate(
    step_s: float, config: ParallelConfig = CONFIG, *, unmeasured: tuple[str, ...] = ()
) -> Estimate:
    sizes = {
        "weights": 10.5,
        "gradients": 20.9,
        "optimizer": 3.9,
        "activations": 18.6,
        "logits": 0.4,
        "buffers": 1.7,
        "overhead": 1.0,
    }
    total = sum(sizes.values()) * GIB
    return Estimate(
        feasible=True,
        parallel=config,
        memory=MemoryEstimate(
            total_bytes=total,
            capacity_bytes=75.2 * GIB,
            worst_stage=0,
            layer_activations_bytes=GIB,
            allocated_bytes=total,
            reserved_bytes=total,
            device_bytes=79.2 * GIB,
            **{f"{name}_bytes": size * GIB for name, size in sizes.items()},
        ),
        time=TimeEstimate(
            step_s=step_s, parts_s={"compute": 0.9 * step_s, "pipeline_bubble": 0.1 * step_s}
        ),
        tokens_per_second=3.1e6 / step_s,
        tokens_per_second_per_gpu=3_072.0 / step_s,
        model_tflops_per_gpu=3_300.0 / step_s,
        mfu=10.6 / step_s,
        hfu=12.1 / step_s,
        mfu_causal=8.4 / step_s,
        hfu_causal=9.2 / step_s,
        intervals=Intervals(
            confidence=0.9,
            step_s=(0.93 * step_s, 1.08 * step_s),
            memory_total_bytes=(0.95 * total, 1.05 * total),
            memory_reserved_bytes=(0.95 * total, 1.28 * total),
            source="by hand",
        ),
        out_of_memory_probability=0.032,
        fit="tight",
        days=1.1 * step_s,
        gpu_hours=26_000.0 * step_s,
        cost=9.1e4 * step_s,
        energy=7e10 * step_s,
        familiarity=Familiarity(class_="familiar", n=12, unmeasured=unmeasured),
        provenance={"num_gpus": 1024},
    )


def recommendations() -> RecommendAnswer:
    rows = [
        Recommendation(
            rank=rank,
            parallel=config,
            estimate=estimate(step_s, config, unmeasured=unmeasured),
            group=rank,
        )
        for rank, config, step_s, unmeasured in zip(
            (1, 2, 3), CONFIGS, (19.43, 19.57, 711.8), ((), (), ("dualpipe-v",)), strict=True
        )
    ]
    return RecommendAnswer(
        id=None,
        recommendations=tuple(rows),
        space=SPACE,
        rejections={"world_size_mismatch": 151, "memory": 3_550},
    )


def infeasible() -> Estimate:
    fixes = [
        Fix(
            change=change,
            changed=(),
            parallel=CONFIG,
            num_gpus=1024,
            memory_total_bytes=60 * GIB,
            fit="fits",
            memory_saved_bytes=56.4 * GIB,
            step_s=19.5,
            step_change_fraction=more,
            days=21.4,
        )
        for change, more in (
            ("TP 2 -> 4 (DP 64 -> 32)", 0.01),
            ("recompute selective -> full, more GPUs, 1024 -> 2048", -0.3),
        )
    ]
    reason = Reason(
        code="memory",
        message="needs 116.4 GiB, has 75.2 GiB: activations 49.5 GiB, gradients 41.8 GiB",
    )
    return replace(estimate(19.41), feasible=False, reasons=(reason,), fixes=tuple(fixes))


def tuned() -> TuneResult:
    fidelities = (Fidelity(), None, Fidelity(num_hidden_layers=4))
    rows = []
    for rank, (config, before, fidelity) in enumerate(
        zip(CONFIGS, (0.3996, 0.4008, 0.3966), fidelities, strict=True), start=1
    ):
        after = estimate(3.1 * before, config)
        run = None
        if fidelity is not None:
            run = Measurement(
                status="ok",
                step_s=0.8645,
                extrapolated_step_s=1.26,
                tokens_per_second_per_gpu=1_184.0,
                fidelity=fidelity,
            )
        rows.append(
            Recommendation(
                rank=rank,
                parallel=config,
                estimate=estimate(before, config),
                calibrated_estimate=after,
                measurement=run,
            )
        )
    search = SearchSummary(
        id="cb44852163daadeb",
        state=SearchState.SUCCEEDED,
        profile_runs=6,
        gpu_seconds=184.0,
        grid_gpu_seconds=2_068.0,
        stopped_because="budget_runs",
        reduced_runs=1,
    )
    best = rows[0]
    answer = Answer(
        parallel=best.parallel,
        step_s=19.41,
        step_s_interval=(19.1, 19.7),
        source="calibrated",
        known_from_runs=6,
        measured=Repeats(
            run_id="r", step_s=19.41, num_runs=2, low_s=19.4, high_s=19.41, reduced=False
        ),
        outside=False,
        as_good=0,
        free_memory_bytes=10 * GIB,
        out_of_memory_probability=0.0,
        baseline=None,
    )
    return TuneResult(
        id=None,
        query={},
        recommendations=tuple(rows),
        space=SPACE,
        rejections={},
        search=search,
        answer=answer,
    )


def served(throughput: float, tensor: int, attention: int) -> ServingRecommendation:
    config = ServingConfig(
        tensor_parallel_size=tensor, attention_data_parallel_size=attention, expert_parallel_size=8
    )
    tail = Tail(p50=0.387, p90=0.529, p99=3.995)
    return ServingRecommendation(
        rank=attention,
        parallel=config,
        estimate=InferenceEstimate(
            feasible=True,
            parallel=config,
            replicas=2,
            ttft_s=0.594,
            tpot_s=0.01587,
            request_latency_s=16.45,
            output_tokens_per_second_per_gpu=throughput,
            output_tokens_per_second_per_user=63.0,
            running_requests=64.0,
            concurrency=64.0,
            request_rate_per_second=3.9,
            users=64,
            cost_per_million_tokens=TokenPrices(input=0.21, output=4.31),
            max_concurrency=744,
            max_concurrency_without_preemption=706,
            kv_cache_limited=False,
            cost_per_million_output_tokens=4.52,
            tails=Tails(ttft_s=tail, tpot_s=tail, request_latency_s=tail),
            memory=ServingMemory(
                total_bytes=27.2 * GIB,
                capacity_bytes=125.8 * GIB,
                weights_bytes=15.3 * GIB,
                kv_cache_bytes=9.3 * GIB,
                activations_bytes=0.6 * GIB,
                logits_bytes=0.1 * GIB,
                overhead_bytes=1.9 * GIB,
                kv_cache_capacity_bytes=90 * GIB,
            ),
            intervals=ServingIntervals(
                confidence=0.9,
                ttft_s=(0.5275, 0.6689),
                tpot_s=(0.01495, 0.01685),
                output_tokens_per_second_per_gpu=(0.93 * throughput, 1.08 * throughput),
                source="by hand",
            ),
        ),
    )


def serving_recommendations() -> RecommendAnswer:
    return RecommendAnswer(
        id=None,
        recommendations=(served(4_860.0, 8, 1), served(4_650.0, 4, 2)),
        space=SPACE,
        rejections={},
    )


SHOWN: dict[str, Callable[[], None]] = {
    "estimate": lambda: tables.print_estimate(estimate(19.43, unmeasured=("offload",))),
    "estimate, infeasible": lambda: tables.print_estimate(infeasible()),
    "recommend": lambda: tables.print_recommendations(recommendations(), top=5),
    "tune": lambda: search_output.print_result(tuned()),
    "estimate, serving": lambda: serving_tables.print_inference_estimate(
        served(4_860.0, 8, 1).estimate, query=SERVED
    ),
    "recommend, serving": lambda: serving_tables.print_serving_recommendations(
        serving_recommendations(), query=SERVED
    ),
}


def rendered(width: int) -> str:
    """All of them on a screen of this width."""
    text = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        with contextlib.redirect_stdout(text):
            for name, show in SHOWN.items():
                print(f"$ {name}")
                show()
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    for width in WIDTHS:
        (FOLDER / f"{width}.txt").write_text(rendered(width), encoding="utf-8")
