"""Serving results as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from hp_tool.answers import RecommendAnswer
from hp_tool.cli.tables import (
    print_fixes,
    print_parts,
    print_reasons,
    print_rejections,
    print_space,
    print_table,
    wide_console,
)
from hp_tool.domain.serving import InferenceEstimate, PoolRecommendation, ServingRecommendation
from hp_tool.render.words import serving_arithmetic
from hp_tool.units import duration, gib


def print_inference_estimate(estimate: InferenceEstimate) -> None:
    """One configuration: memory by part, why it is infeasible with how to fix it, and latencies with intervals and tails."""
    console = wide_console()
    if estimate.parallel is not None:
        console.print(serving_arithmetic(estimate.parallel, replicas=estimate.replicas))
    print_reasons(console, estimate.reasons)
    if estimate.memory is not None:
        memory = estimate.memory
        console.print(f"memory on the fullest device: {gib(memory.total_bytes)} of {gib(memory.capacity_bytes)}")
        print_parts(console, memory.parts_bytes)
    if not estimate.feasible:
        rows = [
            (
                fix.change,
                *map(duration, (fix.ttft_s, fix.tpot_s, fix.request_latency_s)),
                f"{fix.output_tokens_per_second_per_gpu:,.0f}",
                "-" if fix.throughput_change_fraction is None else f"{fix.throughput_change_fraction:+.1%}",
                gib(fix.memory_total_bytes),
            )
            for fix in estimate.mends
        ]
        heads = ("TTFT", "TPOT", "request", "tokens/s/GPU", "change", "memory")
        print_fixes(console, heads, rows, {fix.change: fix.remaining for fix in estimate.mends})
    if estimate.tails is None or estimate.intervals is None:
        return
    rows = []
    for name in ("ttft_s", "tpot_s", "request_latency_s"):
        tail, interval = getattr(estimate.tails, name), getattr(estimate.intervals, name, None)
        between = f"{duration(interval[0])} to {duration(interval[1])}" if interval else ""
        figures = (duration(getattr(estimate, name)), between, *map(duration, (tail.p50, tail.p90, tail.p99)))
        rows.append((name.removesuffix("_s").replace("_", " "), *figures))
    print_table(console, ("", "mean", "90 % interval", "p50", "p90", "p99"), rows, title="latency")
    limit = "limited by the KV cache" if estimate.kv_cache_limited else "all that are in flight"
    console.print(
        f"{estimate.output_tokens_per_second_per_gpu:,.0f} output tokens/s/GPU, {estimate.running_requests:,.0f} requests "
        f"running ({limit}), at most {estimate.max_concurrency:,}; never preempted up to "
        f"{estimate.max_concurrency_without_preemption:,}"
    )
    if estimate.goodput is not None:
        goodput = estimate.goodput
        rate = f"{goodput.requests_per_second_per_gpu:,.3g} requests/s/GPU"
        console.print(f"goodput: {rate} within the targets, {goodput.fraction:.0%} of all")
    if estimate.cost_per_million_output_tokens is not None:
        console.print(f"${estimate.cost_per_million_output_tokens:,.2f} per million output tokens")


def print_serving_recommendations(answer: RecommendAnswer) -> None:
    """The ranked configurations, and how many each rule rejected."""
    console = wide_console()
    rows = []
    for row in answer.recommendations:
        assert isinstance(row, ServingRecommendation)
        e = row.estimate
        assert e.memory is not None
        rows.append(
            (
                str(row.rank),
                _layout(row),
                *_latencies(e.ttft_s, e.tpot_s, e.request_latency_s),
                f"{e.output_tokens_per_second_per_gpu:,.0f}",
                f"{e.running_requests:,.0f}",
                gib(e.memory.total_bytes),
            )
        )
    heads = ("rank", "layout", "TTFT", "TPOT", "request", "tokens/s/GPU", "running", "memory")
    print_table(console, heads, rows, title="best serving configurations by the cost model")
    print_space(console, answer)
    print_rejections(console, answer)
    if answer.disaggregated is not None:
        _print_pools(console, answer.disaggregated)
    if answer.throughput_front is not None:
        _print_pareto(console, answer.throughput_front)


def _print_pools(console: Console, ranked: Sequence[PoolRecommendation]) -> None:
    heads = ("rank", "prefill", "decode", "TTFT", "TPOT", "request", "tokens/s/GPU", "GPUs", "prefill busy")
    rows = []
    for row in ranked:
        e = row.estimate
        pools = (f"{pool.replicas} x TP {pool.tensor_parallel_size} {pool.gpu}" for pool in (row.prefill, row.decode))
        latencies = _latencies(e.ttft_s, e.tpot_s, e.request_latency_s)
        throughput = f"{e.output_tokens_per_second_per_gpu:,.0f}"
        rows.append((str(row.rank), *pools, *latencies, throughput, str(e.num_gpus), f"{e.prefill_busy:.0%}"))
    print_table(console, heads, rows, title="separate pools for prefill and decoding")


def _print_pareto(console: Console, optimal: Sequence[ServingRecommendation]) -> None:
    rows = []
    for row in optimal:
        e = row.estimate
        rates = (e.output_tokens_per_second_per_user, e.output_tokens_per_second_per_gpu)
        load = str(e.provenance["load"]).split(", ")[1]
        rows.append((_layout(row), load, f"{rates[0]:,.1f}", f"{rates[1]:,.0f}", *_latencies(e.ttft_s, e.tpot_s)))
    heads = ("layout", "load", "tokens/s/user", "tokens/s/GPU", "TTFT", "TPOT")
    print_table(console, heads, rows, title="Pareto-optimal configurations: throughput per user and per GPU")


def print_tuned_serving(console: Console, ranked: Sequence[ServingRecommendation]) -> None:
    """Latencies predicted before the runs, and predicted or measured after them."""
    rows = []
    for row in ranked:
        before, after = row.estimate, row.calibrated_estimate or row.estimate
        latencies = _latencies(before.ttft_s, after.ttft_s, before.tpot_s, after.tpot_s)
        throughput = f"{after.output_tokens_per_second_per_gpu:,.1f}"
        source = "run" if row.measurement else "prediction"
        rows.append((str(row.rank), _layout(row), str(row.parallel.max_num_seqs), *latencies, throughput, source))
    heads = ("rank", "layout", "batch", "TTFT before", "after", "TPOT before", "after", "tokens/s/GPU", "source")
    title = "latency under the whole load, before and after the runs"
    print_table(console, heads, rows, title=title, bold_first=ranked[0].rank == 1)
    best = ranked[0]
    source = "measured" if best.measurement else "predicted, not measured"
    line = f"best: {_layout(best)}, {best.parallel.max_num_seqs} requests at once ({source})"
    console.print(line, style="bold", highlight=False)


def print_nearest_serving(console: Console, nearest: Iterable[object]) -> None:
    """If no serving configuration meets the targets: those that come nearest, and what each of them lacks."""
    for row in nearest:
        if isinstance(row, ServingRecommendation):
            reasons = "; ".join(reason.message for reason in (row.calibrated_estimate or row.estimate).reasons)
            line = f"nearest: {_layout(row)}, {row.parallel.max_num_seqs} requests at once: {reasons}"
            console.print(line, highlight=False)


def _layout(row: ServingRecommendation) -> str:
    return serving_arithmetic(row.parallel, replicas=row.estimate.replicas)


def _latencies(*seconds: float | None) -> Iterable[str]:
    return ("-" if each is None else duration(each) for each in seconds)
