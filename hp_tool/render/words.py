"""Configurations in words and cells, for every table: the command line's, a notebook's, a plot's."""

from __future__ import annotations

from collections.abc import Sequence

from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.serving import ServingConfig


def configuration_cells(configs: Sequence[ParallelConfig]) -> tuple[list[str], list[list[str]]]:
    """Column names, and a row of cells for each configuration; some stand there only where a configuration uses them."""
    columns: dict[str, list[str]] = {
        "TP": [str(c.tensor_parallel_size) for c in configs],
        "PP": [str(c.pipeline_parallel_size) for c in configs],
        "VPP": [str(c.virtual_pipeline_parallel_size) for c in configs],
        "CP": [str(c.context_parallel_size) for c in configs],
        "EP": [str(c.expert_parallel_size) for c in configs],
        "ETP": [str(c.expert_tensor_parallel_size) for c in configs],
        "DP": [str(c.data_parallel_size) for c in configs],
        "schedule": [c.pipeline_schedule or "-" for c in configs],
        "micro-batch": [str(c.micro_batch_size) for c in configs],
        "SP": ["yes" if c.sequence_parallel else "no" for c in configs],
        "recompute": [recompute_name(c.recompute) for c in configs],
        "ZeRO": [str(c.zero_stage) for c in configs],
        "shards": [str(c.data_parallel_shard_size or c.data_parallel_size) for c in configs],
    }
    idle = {"CP": {"1"}, "EP": {"1"}, "ETP": {"1"}, "schedule": {"-"}}
    shown = {name: cells for name, cells in columns.items() if set(cells) != idle.get(name)}
    if not any(c.data_parallel_shard_size for c in configs):
        del shown["shards"]
    return list(shown), [list(row) for row in zip(*shown.values(), strict=True)]


def arithmetic(config: ParallelConfig) -> str:
    """`TP 8 x PP 4 x DP 2 = 64 devices`, and the rest of the configuration."""
    sizes = {"TP": config.tensor_parallel_size, "PP": config.pipeline_parallel_size, "CP": config.context_parallel_size}
    shown = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "CP"] + [f"DP {config.data_parallel_size}"]
    total = config.data_parallel_size
    for size in sizes.values():
        total *= size
    chunks = f", {config.virtual_pipeline_parallel_size} chunks per rank" if config.virtual_pipeline_parallel_size > 1 else ""
    chunks += f", {config.pipeline_schedule}" if config.pipeline_schedule else ""
    experts = {"EP": config.expert_parallel_size, "ETP": config.expert_tensor_parallel_size}
    chunks += "".join(f", {name} {size}" for name, size in experts.items() if size > 1)
    return (
        f"{' x '.join(shown)} = {total} devices{chunks}, micro-batch {config.micro_batch_size}, "
        f"SP {'on' if config.sequence_parallel else 'off'}, recompute {recompute_name(config.recompute)}, "
        f"ZeRO {config.zero_stage}" + (f" in groups of {shards}" if (shards := config.data_parallel_shard_size) else "")
    )


def serving_arithmetic(config: ServingConfig, *, replicas: int | None) -> str:
    """`TP 4 x 2 replicas`; pipeline, expert and attention data parallelism where they are used."""
    sizes = {
        "TP": config.tensor_parallel_size,
        "PP": config.pipeline_parallel_size,
        "attention DP": config.attention_data_parallel_size,
    }
    shown = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "TP"]
    if replicas is not None:
        shown.append(f"{replicas} replica{'s' if replicas != 1 else ''}")
    experts = f", EP {config.expert_parallel_size}" if config.expert_parallel_size > 1 else ""
    return " x ".join(shown) + experts
