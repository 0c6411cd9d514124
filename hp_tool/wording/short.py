"""First line of an answer: the recommended configuration and its metrics."""

from collections.abc import Iterator

from hp_tool.domain.latencies import LATENCIES, REQUEST
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingRecommendation
from hp_tool.domain.targets import Targets
from hp_tool.domain.units import GIB, format_decimal, format_duration, format_duration_range

NON_DEFAULT_WORDS = {
    "expert_tensor_parallel_size": "ETP {}",
    "pipeline_schedule": "schedule {}",
    "moe_token_dispatcher_type": "dispatcher {}",
}


def layout_words(config: ParallelConfig) -> str:
    """Return `TP 4, PP 4 (10 chunks), CP 2, DP 2, micro-batch 1, no recomputation`."""
    chunks = config.virtual_pipeline_parallel_size
    parts = [
        f"TP {config.tensor_parallel_size}",
        f"PP {config.pipeline_parallel_size}" + (f" ({chunks} chunks)" if chunks > 1 else ""),
        f"CP {config.context_parallel_size}" if config.context_parallel_size > 1 else "",
        f"EP {config.expert_parallel_size}" if config.expert_parallel_size > 1 else "",
        f"DP {config.data_parallel_size}",
        f"micro-batch {config.micro_batch_size}",
        _recomputation_words(config),
        f"ZeRO {config.zero_stage}" if config.zero_stage != 1 else "",
    ]
    values = {name: getattr(config, name) for name in NON_DEFAULT_WORDS}
    parts += [
        NON_DEFAULT_WORDS[name].format(each)
        for name, each in values.items()
        if each not in (None, 1)
    ]
    return ", ".join(filter(None, parts))


def _recomputation_words(config: ParallelConfig) -> str:
    name = recompute_name(config.recompute)
    return "no recomputation" if name == "none" else f"recompute {name}"


def training_figures_words(estimate: Estimate) -> str:
    """Return `14.6 s per step (11.8-18.2 s), 1,122 tokens/s per GPU, 54.6% MFU, 62 of 75 GiB`."""
    if estimate.time is None or estimate.memory is None:
        return ""
    span = ""
    if estimate.intervals is not None:
        span = f" ({format_duration_range(*estimate.intervals.step_s)})"
    parts = [f"{format_duration(estimate.time.step_s)} per step{span}"]
    if estimate.tokens_per_second_per_gpu is not None:
        parts.append(f"{estimate.tokens_per_second_per_gpu:,.0f} tokens/s per GPU")
    if estimate.mfu is not None:
        parts.append(f"{estimate.mfu:.1%} MFU")
    memory = estimate.memory
    parts.append(f"{memory.total_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f} GiB")
    return ", ".join(parts)


def use_training_words(row: Recommendation) -> str:
    """Return the configuration to run, with the expected step time, throughput and memory."""
    return (
        f"Use {_chosen_gpus_words(row)}{layout_words(row.parallel)}: "
        f"{training_figures_words(row.preferred_estimate)}."
    )


def _chosen_gpus_words(row: Recommendation | ServingRecommendation) -> str:
    """Return `16 GPUs with ` if the ranking chose the number of GPUs, else an empty string."""
    chosen = row.set.get("cluster.num_gpus")
    return "" if chosen is None else f"{chosen:,} GPU{'' if chosen == 1 else 's'} with "


def training_totals_words(row: Recommendation) -> str:
    """Return `The training takes 1.8 days (1.5-2.1 days), $18,966 ($15,985-$22,502), and meets the
    deadline with 97% probability.`

    Empty if the query does not set the total tokens.
    """
    if row.days_interval is None:
        return ""
    days = row.preferred_estimate.calendar_days or 0.0
    span = "-".join(map(format_decimal, row.days_interval))
    text = f"The training takes {format_decimal(days)} days ({span} days)"
    if row.cost is not None and row.cost_interval is not None:
        low, high = row.cost_interval
        text += f", ${row.cost:,.0f} (${low:,.0f}-${high:,.0f})"
    if row.deadline_probability is not None:
        chance = row.deadline_probability
        text += (
            f", and meets the deadline with {'over 99%' if chance > 0.995 else f'{chance:.0%}'} "
            "probability"
        )
    return f"{text}."


def serving_layout_words(config: ServingConfig, replicas: int | None) -> str:
    """Return `TP 4, 2 replicas`."""
    parts = [
        f"TP {config.tensor_parallel_size}",
        f"PP {config.pipeline_parallel_size}" if config.pipeline_parallel_size > 1 else "",
        f"attention DP {config.attention_data_parallel_size}"
        if config.attention_data_parallel_size > 1
        else "",
        f"EP {config.expert_parallel_size}" if config.expert_parallel_size > 1 else "",
        f"{config.redundant_experts} redundant experts" if config.redundant_experts else "",
        "" if replicas is None else f"{replicas} replica{'' if replicas == 1 else 's'}",
    ]
    return ", ".join(filter(None, parts))


def use_serving_words(row: ServingRecommendation, *, targets: Targets | None = None) -> str:
    """Return the configuration to serve with and its expected metrics, including the quantiles
    limited by `targets`.
    """
    chosen = serving_layout_words(row.parallel, row.estimate.replicas)
    return (
        f"Use {_chosen_gpus_words(row)}{chosen}: "
        f"{serving_figures_words(row.estimate, targets=targets)}."
    )


def serving_figures_words(estimate: InferenceEstimate, *, targets: Targets | None = None) -> str:
    """Return `378 ms to the first token, p95 812 ms (target 1.00 s), 15.9 ms per output token, 494
    output tokens/s per GPU (465-524), 27.1 of 125.8 GiB`.

    Quantiles limited by `targets` are included.
    """
    intervals = estimate.intervals
    parts = []
    for latency in LATENCIES.values():
        limited = list(_target_quantile_words(estimate, latency.key, targets or Targets()))
        value = getattr(estimate, latency.key)
        if value is None or (latency is REQUEST and not limited):
            continue
        ends = getattr(intervals, latency.key) if intervals and latency is not REQUEST else None
        span = f" ({format_duration_range(*ends)})" if ends else ""
        parts += [f"{format_duration(value)} {latency.per}{span}", *limited]
    if (rate := estimate.output_tokens_per_second_per_gpu) is not None:
        low, high = intervals.output_tokens_per_second_per_gpu if intervals else (rate, rate)
        span = f" ({low:,.0f}-{high:,.0f})" if intervals else ""
        parts.append(f"{rate:,.0f} output tokens/s per GPU{span}")
    if estimate.memory is not None:
        memory = estimate.memory
        parts.append(f"{memory.total_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f} GiB")
    return ", ".join(parts)


def _target_quantile_words(
    estimate: InferenceEstimate, latency: str, targets: Targets
) -> Iterator[str]:
    """Yield `p95 812 ms (target 1.00 s)` for each quantile of a latency that has a target."""
    for _, limited, quantile, limit in targets.limits():
        if limited == latency and quantile is not None and estimate.tails is not None:
            seconds = getattr(estimate.tails, latency).quantiles[quantile]
            yield f"{quantile} {format_duration(seconds)} (target {format_duration(limit)})"
