"""A change of configuration in words: `TP 4 -> 8 (DP 16 -> 8)`."""

from __future__ import annotations

from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.serving import ServingConfig

Config = ParallelConfig | ServingConfig

LABELS = {
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "virtual_pipeline_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "expert_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "attention_data_parallel_size": "attention DP",
    "max_num_seqs": "requests at once",
    "max_num_batched_tokens": "tokens a pass",
    "micro_batch_size": "micro-batch",
    "sequence_parallel": "SP",
    "recompute": "recompute",
    "zero_stage": "ZeRO",
    "data_parallel_shard_size": "shard group",
    "data_parallel_size": "DP",
    "pipeline_schedule": "schedule",
}


def changed_fields(before: Config, after: Config) -> tuple[str, ...]:
    """Names of the fields that differ, in the order of LABELS."""
    return tuple(name for name in LABELS if getattr(before, name, None) != getattr(after, name, None))


def change_in_words(before: Config, after: Config, *, gpus: tuple[int, int]) -> str:
    """What to change, and in brackets what follows from it; `gpus` are the devices before and after."""
    names = changed_fields(before, after)
    told = [f"more GPUs, {gpus[0]} -> {gpus[1]}"] if gpus[0] != gpus[1] else []
    follows = _follows(before, after) if told or len(names) > 1 else set()
    told += [_one(name, before, after) for name in names if name not in follows]
    brackets = ", ".join(_one(name, before, after) for name in names if name in follows)
    return ", ".join(told) + (f" ({brackets})" if brackets else "")


def _follows(before: Config, after: Config) -> set[str]:
    """What nobody chooses: the replicas that remain, and sequence parallelism where tensor parallelism begins or ends."""
    crossed = (before.tensor_parallel_size > 1) != (after.tensor_parallel_size > 1)
    return {"data_parallel_size", "sequence_parallel"} if crossed else {"data_parallel_size"}


def _one(name: str, before: Config, after: Config) -> str:
    return f"{LABELS[name]} {_value(name, before)} -> {_value(name, after)}"


def _value(name: str, config: Config) -> str:
    if name == "recompute" and isinstance(config, ParallelConfig):
        return recompute_name(config.recompute)
    value = getattr(config, name)
    if name == "data_parallel_shard_size" and not value:
        return f"all of DP {config.data_parallel_size}"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
