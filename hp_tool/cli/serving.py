"""Serving results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hp_tool.answers import RecommendAnswer
from hp_tool.domain.serving import InferenceEstimate, PoolRecommendation, ServingMend, ServingRecommendation
from hp_tool.render.words import serving_arithmetic
from hp_tool.units import duration, gib


def print_inference_estimate(estimate: InferenceEstimate) -> None:
    """One configuration: its verdict, memory by part, latencies with their intervals and tails."""
    console = _console()
    if estimate.parallel is not None:
        console.print(serving_arithmetic(estimate.parallel, replicas=estimate.replicas))
    for reason in estimate.reasons:
        console.print(f"[red]{reason.code}[/red]: {reason.message}")
    if estimate.memory is not None:
        memory = estimate.memory
        console.print(f"memory on the fullest device: {gib(memory.total_bytes)} of {gib(memory.capacity_bytes)}")
        table = Table()
        table.add_column("part")
        table.add_column("size", justify="right")
        for name, size in memory.parts_bytes.items():
            table.add_row(name.replace("_", " "), gib(size))
        console.print(table)
    if not estimate.feasible:
        _print_mends(console, estimate.mends)
    if estimate.tails is None or estimate.intervals is None:
        return
    table = Table(title="latency")
    for name in ("", "mean", "90 % interval", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name in ("ttft_s", "tpot_s", "request_latency_s"):
        tail, interval = getattr(estimate.tails, name), getattr(estimate.intervals, name, None)
        between = f"{duration(interval[0])} to {duration(interval[1])}" if interval else ""
        quantiles = (duration(tail.p50), duration(tail.p90), duration(tail.p99))
        table.add_row(name.removesuffix("_s").replace("_", " "), duration(getattr(estimate, name)), between, *quantiles)
    console.print(table)
    limit = "bounded by the KV cache" if estimate.kv_cache_limited else "all that are in flight"
    console.print(
        f"{estimate.output_tokens_per_second_per_gpu:,.0f} output tokens/s/GPU, {estimate.running_requests:,.0f} requests "
        f"running ({limit}), at most {estimate.max_concurrency:,}; never preempted up to "
        f"{estimate.max_concurrency_without_preemption:,}"
    )
    if estimate.goodput is not None:
        good = estimate.goodput
        console.print(
            f"goodput: {good.requests_per_second_per_gpu:,.3g} requests/s/GPU within the targets, {good.fraction:.0%} of all"
        )
    if estimate.cost_per_million_output_tokens is not None:
        console.print(f"${estimate.cost_per_million_output_tokens:,.2f} per million output tokens")


def _print_mends(console: Console, mends: Sequence[ServingMend]) -> None:
    if not mends:
        console.print("no small change mends it; `hp-tool recommend` ranks the whole space")
        return
    table = Table(title="what would mend it")
    table.add_column("change")
    for name in ("TTFT", "TPOT", "request", "tokens/s/GPU", "change", "memory"):
        table.add_column(name, justify="right")
    for mend in mends:
        change = mend.throughput_change_fraction
        table.add_row(
            mend.change, duration(mend.ttft_s), duration(mend.tpot_s), duration(mend.request_latency_s),
            f"{mend.output_tokens_per_second_per_gpu:,.0f}", "-" if change is None else f"{change:+.1%}",
            gib(mend.memory_total_bytes),
        )  # fmt: skip
    console.print(table)
    for mend in mends:
        for reason in mend.remaining:
            console.print(f"{mend.change} is the nearest, yet [red]{reason.code}[/red]: {reason.message}")


def print_serving_recommendations(answer: RecommendAnswer) -> None:
    """The ranked configurations, and how many were turned away by which rule."""
    console = _console()
    table = Table(title="best serving configurations by the cost model")
    for name in ("rank", "layout", "TTFT", "TPOT", "request", "tokens/s/GPU", "running", "memory"):
        table.add_column(name, justify="right")
    for row in answer.recommendations:
        assert isinstance(row, ServingRecommendation)
        e = row.estimate
        assert e.ttft_s is not None and e.tpot_s is not None and e.request_latency_s is not None and e.memory is not None
        table.add_row(
            str(row.rank), serving_arithmetic(row.parallel, replicas=e.replicas), duration(e.ttft_s), duration(e.tpot_s),
            duration(e.request_latency_s), f"{e.output_tokens_per_second_per_gpu:,.0f}", f"{e.running_requests:,.0f}",
            gib(e.memory.total_bytes),
        )  # fmt: skip
    console.print(table)
    space = answer.space
    console.print(
        f"{space.legal:,} legal configurations, {space.feasible:,} of them acceptable, ranked in {duration(space.seconds)}"
    )
    if answer.rejections:
        console.print("turned away: " + ", ".join(f"{name} {count:,}" for name, count in answer.rejections.items()))
    if answer.disaggregated is not None:
        _print_pools(console, answer.disaggregated)
    if answer.throughput_front is not None:
        _print_front(console, answer.throughput_front)


def _print_pools(console: Console, rows: Sequence[PoolRecommendation]) -> None:
    """Pairs of pools beside the shared replicas above."""
    table = Table(title="pools of their own for prefill and decoding")
    for name in ("rank", "prefill", "decode", "TTFT", "TPOT", "request", "tokens/s/GPU", "GPUs", "prefill busy"):
        table.add_column(name, justify="right")
    for row in rows:
        e = row.estimate
        pools = (f"{pool.replicas} x TP {pool.tensor_parallel_size} {pool.gpu}" for pool in (row.prefill, row.decode))
        table.add_row(
            str(row.rank), *pools,
            duration(e.ttft_s), duration(e.tpot_s), duration(e.request_latency_s), f"{e.output_tokens_per_second_per_gpu:,.0f}",
            str(e.num_gpus), f"{e.prefill_busy:.0%}",
        )  # fmt: skip
    console.print(table)


def _print_front(console: Console, rows: Sequence[ServingRecommendation]) -> None:
    """What a faster answer to each user costs."""
    table = Table(title="throughput: what no other beats for a user and for a GPU")
    for name in ("layout", "load", "tokens/s/user", "tokens/s/GPU", "TTFT", "TPOT"):
        table.add_column(name, justify="right")
    for row in rows:
        e = row.estimate
        assert e.ttft_s is not None and e.tpot_s is not None  # on the front
        table.add_row(
            serving_arithmetic(row.parallel, replicas=e.replicas), str(e.provenance["load"]).split(", ")[1],
            f"{e.output_tokens_per_second_per_user:,.1f}", f"{e.output_tokens_per_second_per_gpu:,.0f}",
            duration(e.ttft_s), duration(e.tpot_s),
        )  # fmt: skip
    console.print(table)


def print_tuned_serving(console: Console, rows: Sequence[ServingRecommendation]) -> None:
    """Latencies predicted before, and after the runs: `measured` where a replica of the configuration ran."""
    table = Table(title="latency under the whole load: predicted before, and known after the runs")
    for name in ("rank", "layout", "batch", "TTFT before", "after", "TPOT before", "after", "tokens/s/GPU", "known by"):
        table.add_column(name, justify="right")
    for row in rows:
        before, after = row.estimate, row.calibrated_estimate or row.estimate
        table.add_row(
            str(row.rank), serving_arithmetic(row.parallel, replicas=before.replicas), str(row.parallel.max_num_seqs),
            *("-" if s is None else duration(s) for s in (before.ttft_s, after.ttft_s, before.tpot_s, after.tpot_s)),
            f"{after.output_tokens_per_second_per_gpu:,.1f}", "run" if row.measurement else "prediction",
            style="bold" if row.rank == 1 else None,
        )  # fmt: skip
    console.print(table)
    best = rows[0]
    how = "measured" if best.measurement else "predicted, not measured"
    layout = serving_arithmetic(best.parallel, replicas=best.estimate.replicas)
    console.print(f"best: {layout}, {best.parallel.max_num_seqs} requests at once ({how})", style="bold", highlight=False)


def print_serving_misses(console: Console, rows: Sequence[ServingRecommendation]) -> None:
    """What comes nearest where nothing keeps to the targets."""
    for row in rows:
        told = row.calibrated_estimate or row.estimate
        reasons = "; ".join(reason.message for reason in told.reasons)
        layout = serving_arithmetic(row.parallel, replicas=told.replicas)
        console.print(f"nearest: {layout}, {row.parallel.max_num_seqs} requests at once: {reasons}", highlight=False)


def _console() -> Console:
    """Standard output; wide enough for the tables where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
