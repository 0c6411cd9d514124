"""What inference runs serve; everything else is refused by name, as `domain.profiling` does for training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hp_tool.domain.measurement import Runner
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.profiling import unprofiled_model
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.workload import InferenceWorkload

_SERVED = (
    "input_length",
    "output_length",
    "concurrency",
    "precision",
    "kv_cache_precision",
    "engine",
    "engine_version",
    "load",
)
"""Fields of a load that a run follows or that the rules below look at; any other must be left at its default."""


def unserved(*, model: ModelSpec, inference: InferenceWorkload, runner: Runner) -> Iterator[tuple[str, str]]:
    """(field, words) of what no configuration of this query can be served with; nothing where all is well."""
    load = inference.load
    rules: list[tuple[bool, str, str]] = [
        (inference.precision not in ("bf16", "fp16", "fp32"), "inference.precision", f"precision: {inference.precision}"),
        (
            inference.kv_cache_precision not in (None, inference.precision),
            "inference.kv_cache_precision",
            "a kv_cache_precision other than precision",
        ),
        (inference.concurrency is None, "inference.concurrency", "a load without concurrency"),
        (load is not None and load.arrival != "closed", "inference.load", f"arrival: {load.arrival if load else ''}"),
    ]
    for each in dataclasses.fields(inference):
        value = getattr(inference, each.name)
        if each.name not in _SERVED and value != each.default:
            rules.append((True, f"inference.{each.name}", f"{each.name}: {value}"))
    yield from ((field, words) for unsupported, field, words in rules if unsupported)
    if runner == "megatron-core":
        length = inference.input_length + inference.output_length
        if model.kv_lora_rank is not None:
            yield "model.kv_lora_rank", "multi-head latent attention (kv_lora_rank)"
        yield from unprofiled_model(model, sequence_length=length, of="inference.output_length")


def unserved_sizes(*, model: ModelSpec, inference: InferenceWorkload, parallel: ServingConfig) -> Iterator[tuple[str, str]]:
    """(field, words) of what this configuration asks for and no run does."""
    t = parallel.tensor_parallel_size
    rules = (
        (parallel.pipeline_parallel_size, "pipeline_parallel_size"),
        (parallel.expert_parallel_size, "expert_parallel_size"),
        (parallel.attention_data_parallel_size, "attention_data_parallel_size"),
        (parallel.data_parallel_size, "data_parallel_size"),
    )
    yield from ((f"parallel.{name}", f"{name}: {size}") for size, name in rules if size > 1)
    for count, name in (
        (model.num_attention_heads, "num_attention_heads"),
        (model.kv_heads, "num_key_value_heads"),
        (model.vocab_size, "vocab_size"),
        (model.ffn_size, "intermediate_size"),
    ):
        if count % t:
            yield f"model.{name}", f"{name} {count}, which is not divisible by tensor_parallel_size {t}"
    if (inference.concurrency or 0) > parallel.max_num_seqs:
        yield "parallel.max_num_seqs", f"a concurrency above max_num_seqs {parallel.max_num_seqs}: a run has no queue"
