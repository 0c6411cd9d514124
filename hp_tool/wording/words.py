"""Configurations, and changes between them, in words and table cells."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hp_tool.domain.axes import AXES, AXES_BY_KEY
from hp_tool.domain.latencies import LATENCIES, TPOT, TTFT
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.query import Query
from hp_tool.domain.serving import KvCache, ServingConfig
from hp_tool.domain.targets import parse_target
from hp_tool.domain.units import format_duration, format_factor

Config = ParallelConfig | ServingConfig

MEANINGS = {axis.head: axis.meaning for axis in AXES if axis.meaning} | {
    "MFU": "model FLOPs over peak, attention in full",
    TTFT.head: TTFT.noun,
    TPOT.head: TPOT.noun,
}
"""Meanings of abbreviations in tables and on pages."""

STOP_REASONS = {
    "budget_runs": "the maximum number of runs was reached",
    "budget_gpu_seconds": "the maximum GPU time was reached",
    "no_expected_gain": "more runs are unlikely to help",
    "space_exhausted": "every candidate was run",
    "nothing_feasible": "no configuration fits",
}
"""Description of each reason for which a search stops."""

WIDE_PRECISIONS = ("bf16", "fp16", "fp32")
"""Weight precisions that are not reported as an assumption."""


def missed_words(target: str, *, value: float, limit: float) -> str:
    """Return `30.4 ms per output token (p99) is 30 times the target of 1.0 ms`. `target` is a query
    key such as tpot_p99_s.
    """
    latency, quantile = parse_target(target)
    of = f"{LATENCIES[latency].per}{f' ({quantile})' if quantile else ''}"
    return (
        f"{format_duration(value)} {of} is {format_factor(value / limit)} the target of "
        f"{format_duration(limit)}"
    )


def stopped_words(code: str) -> str:
    """Return the reason why a search stopped."""
    return STOP_REASONS.get(code, code.replace("_", " "))


def unmeasured_words(names: Iterable[str]) -> str:
    """Return the explanation of the `*` on an interval: features that occur in no published run."""
    return f"not validated: no published run uses {', '.join(names)} (wider range)"


def parallel_sizes(config: ParallelConfig) -> tuple[str, int]:
    """Return `TP 8 x PP 4 x DP 2` and the number of devices. CP is included only if it is used."""
    sizes = {
        "TP": config.tensor_parallel_size,
        "PP": config.pipeline_parallel_size,
        "CP": config.context_parallel_size,
    }
    sizes["DP"] = config.data_parallel_size
    return " x ".join(
        f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "CP"
    ), math.prod(sizes.values())


def layout_arithmetic(config: ParallelConfig) -> str:
    """Return `TP 8 x PP 4 x DP 2 = 64 devices`, followed by the rest of the configuration."""
    sizes, total = parallel_sizes(config)
    chunks = (
        f", {config.virtual_pipeline_parallel_size} chunks per rank"
        if config.virtual_pipeline_parallel_size > 1
        else ""
    )
    chunks += f", {config.pipeline_schedule}" if config.pipeline_schedule else ""
    experts = {"EP": config.expert_parallel_size, "ETP": config.expert_tensor_parallel_size}
    chunks += "".join(f", {name} {size}" for name, size in experts.items() if size > 1)
    chunks += (
        f", dispatcher {config.moe_token_dispatcher_type}"
        if config.moe_token_dispatcher_type
        else ""
    )
    return (
        f"{sizes} = {total} devices{chunks}, micro-batch {config.micro_batch_size}, "
        f"SP {'on' if config.sequence_parallel else 'off'}, recompute "
        f"{recompute_name(config.recompute)}, "
        f"ZeRO {config.zero_stage}"
        + (f" in groups of {shards}" if (shards := config.data_parallel_shard_size) else "")
    )


def brief_layout(config: Config) -> str:
    """Return the values that distinguish a configuration, on one line for a narrow terminal: `TP 8
    x PP 4 x DP 2, MBS 1, SP, selective`.
    """
    if isinstance(config, ServingConfig):
        return f"{serving_arithmetic(config, replicas=None)}, engine limit {config.max_num_seqs}"
    sizes, _ = parallel_sizes(config)
    more = {"VPP": config.virtual_pipeline_parallel_size, "EP": config.expert_parallel_size}
    words = [
        sizes,
        *(f"{name} {size}" for name, size in more.items() if size > 1),
        f"MBS {config.micro_batch_size}",
    ]
    words += ["SP"] if config.sequence_parallel else []
    words += [recompute_name(config.recompute)] if config.recompute != "none" else []
    return ", ".join([*words, f"ZeRO {config.zero_stage}"])


def serving_arithmetic(config: ServingConfig, *, replicas: int | None) -> str:
    """Return `TP 4 x 2 replicas`. PP, EP and attention DP are included only if they are used."""
    sizes = {
        "TP": config.tensor_parallel_size,
        "PP": config.pipeline_parallel_size,
        "attention DP": config.attention_data_parallel_size,
    }
    shown = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "TP"]
    if replicas is not None:
        shown.append(f"{replicas} replica{'s' if replicas != 1 else ''}")
    experts = f", EP {config.expert_parallel_size}" if config.expert_parallel_size > 1 else ""
    experts += f", {config.redundant_experts} redundant experts" if config.redundant_experts else ""
    return " x ".join(shown) + experts


def cache_words(cache: KvCache) -> str:
    """Return the capacity of a replica's KV cache: `KV cache: 180,000 tokens per replica
    (160,000-200,000); longest request 131,072`.
    """
    tokens = cache.tokens
    fewer = (
        ""
        if cache.alike
        else f" for requests of {cache.max_context:,} tokens, fewer for shorter requests"
    )
    return (
        f"KV cache: {tokens.expected:,} tokens per replica ({tokens.low:,}-{tokens.high:,})"
        f"{fewer}; longest request {cache.max_context:,}"
    )


def changed_fields(before: Config, after: Config) -> tuple[str, ...]:
    """Return the names of the axes that differ between two configurations."""
    return tuple(
        axis.key
        for axis in AXES
        if axis.named_in_changes and axis.value(before) != axis.value(after)
    )


def change_in_words(before: Config, after: Config, *, gpus: tuple[int, int]) -> str:
    """Return `TP 4 -> 8 (DP 16 -> 8)`: the change, with its consequences in parentheses.

    `gpus` contains the number of devices before and after the change.
    """
    names = changed_fields(before, after)
    chosen = [f"more GPUs, {gpus[0]} -> {gpus[1]}"] if gpus[0] != gpus[1] else []
    derived = set()
    if (
        chosen or len(names) > 1
    ):  # DP follows from the other sizes, and SP from whether TP is above 1.
        crossed = (before.tensor_parallel_size > 1) != (after.tensor_parallel_size > 1)
        derived = {"data_parallel_size", "sequence_parallel"} if crossed else {"data_parallel_size"}
    changes = {
        name: f"{AXES_BY_KEY[name].head} {_axis_value(name, before)} -> {_axis_value(name, after)}"
        for name in names
    }
    chosen += [change for name, change in changes.items() if name not in derived]
    brackets = ", ".join(change for name, change in changes.items() if name in derived)
    return ", ".join(chosen) + (f" ({brackets})" if brackets else "")


def _axis_value(name: str, config: Config) -> str:
    if name == "recompute" and isinstance(config, ParallelConfig):
        return recompute_name(config.recompute)
    value = getattr(config, name)
    if name == "data_parallel_shard_size" and not value:
        return f"all of DP {config.data_parallel_size}"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def machines_heading(query: Query) -> str:
    """Return the ranking criterion for machines: `cheapest within 21 days`."""
    limits, objective = query.constraints, query.objective
    if limits.max_days is not None and objective in (None, "cost"):
        return f"cheapest within {limits.max_days:g} days"
    if limits.max_cost is not None and objective in (None, "days", "throughput"):
        return f"fastest within ${limits.max_cost:,.0f}"
    return {"min_gpus": "fewest GPUs", "days": "fastest", "throughput": "fastest"}.get(
        objective or "", "cheapest"
    )


def assumption_sentences(provenance: Mapping[str, Any]) -> list[str]:
    """Return sentences about what a serving estimate assumes: precision, release of the constants,
    draft model, and a layout that was not preferred.
    """
    assumed = provenance.get("assumed") or {}
    precision = assumed.get("inference.precision")
    sentences = (
        [f"Weights in {precision}, as published."]
        if precision and precision not in WIDE_PRECISIONS
        else []
    )
    if named := provenance.get("engine_version"):
        used = provenance["engine_efficiency"]
        sentences.append(
            f"Release {named} has no constants of its own. The constants of {used} are used."
        )
    if age := provenance.get("constants_age"):
        sentences.append(
            f"The constants are from {provenance['engine_efficiency']}, "
            f"{age['minor_releases']} minor releases before {age['newest']} ({age['as_of']})."
        )
    if drafter := provenance.get("drafter"):
        sentences.append(f"{drafter}.")
    if passed := provenance.get("passed_over"):
        layout = serving_arithmetic(passed["parallel"], replicas=None)
        sentences.append(
            f"{layout} is predicted {passed['better_by_fraction']:.1%} better than rank 1, but no "
            "measured run has a pipeline inside a replica."
        )
    return sentences
