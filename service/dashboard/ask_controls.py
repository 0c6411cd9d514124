"""Controls for the displayed configuration, with their options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, RecomputeModule
from hp_tool.domain.serving import RunConfig
from hp_tool.questions import schema
from hp_tool.questions.form_fields import form_fields
from service.dashboard.ask_question import AT
from service.dashboard.new_search_form import recompute_text

MAX_SIZE = 64
"""Largest parallel size on offer. The URL accepts larger ones."""
MAX_CHUNKS = 16
RECOMPUTATION = {"none": "none", "selective": "selective", "full": "full"}
OTHER_RECOMPUTATION = {
    "torch-fsdp": {"none": "none", "per_op": "per operator", "per_layer": "per layer"},
    "nanotron": {"none": "none", "full": "full"},
}
SWITCH = {"false": "off", "true": "on"}
ZERO = ("nothing", "optimizer", "and gradients", "and weights (FSDP)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One value of a control."""

    value: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A control with its options; ordered options are drawn as a slider."""

    name: str
    """Parameter name in the URL."""
    label: str
    value: str
    options: tuple[Option, ...]
    slider: bool


def controls(
    config: RunConfig, *, model: ModelSpec, framework: str, num_gpus: int
) -> tuple[Control, ...]:
    """Return one control per axis, set to its value in `config`."""
    sizes = [size for size in _powers(MAX_SIZE) if size <= num_gpus]
    named: dict[str, Mapping[str, str]] = {}
    if isinstance(config, ParallelConfig):
        numbers, named = _training_values(config, model, framework, sizes, num_gpus)
        kind = form_fields("training")
    else:
        numbers, kind = {"tensor_parallel_size": sizes, "pipeline_parallel_size": sizes}, {}
        if model.num_experts:
            numbers |= {"expert_parallel_size": sizes, "attention_data_parallel_size": sizes}
        kind = form_fields("inference")
    options = {name: _numbers(getattr(config, name), known) for name, known in numbers.items()}
    return tuple(
        Control(
            name=f"{AT}parallel.{name}",
            label=kind[f"parallel.{name}"].label,
            value=_text(getattr(config, name), labels),
            options=tuple(Option(value=value, label=label) for value, label in labels.items()),
            slider=name not in ("sequence_parallel", "zero_stage"),
        )
        for name, labels in (options | named).items()
    )


def _training_values(
    config: ParallelConfig, model: ModelSpec, framework: str, sizes: list[int], num_gpus: int
) -> tuple[dict[str, list[int]], dict[str, Mapping[str, str]]]:
    """Return the values on offer for training, by axis: (numbers, values with labels)."""
    layers, stages = model.num_hidden_layers, config.pipeline_parallel_size
    numbers = {
        "tensor_parallel_size": [size for size in sizes if size <= model.num_attention_heads],
        "pipeline_parallel_size": [
            size for size in _divisors(layers) if size <= min(num_gpus, MAX_SIZE)
        ],
        "virtual_pipeline_parallel_size": [
            size
            for size in _divisors(layers // stages if layers % stages == 0 else layers)
            if size <= MAX_CHUNKS
        ],
        "context_parallel_size": sizes,
    }
    if model.num_experts:
        experts = [size for size in _divisors(model.num_experts) if size <= num_gpus]
        numbers |= {"expert_parallel_size": experts, "expert_tensor_parallel_size": sizes}
    recomputation = OTHER_RECOMPUTATION.get(framework, RECOMPUTATION)
    recompute = _text(config.recompute, recomputation)
    zero = sorted({*framework_facts(framework).zero_stages, config.zero_stage})
    return numbers | {"micro_batch_size": _powers(16)}, {
        "recompute": {**recomputation, recompute: recomputation.get(recompute, recompute)},
        "sequence_parallel": SWITCH,
        "zero_stage": {str(stage): f"{stage}, {ZERO[stage]}" for stage in zero},
    }


def modules(model: ModelSpec, *, framework: str) -> tuple[RecomputeModule, ...]:
    """Return the modules that selective recomputation of this model may name."""
    if framework != "megatron-core":
        return ()
    present: dict[RecomputeModule, bool] = {
        "core_attn": True,
        "layernorm": True,
        "mlp": model.num_hidden_layers > model.moe_layers,
        "moe": model.num_experts is not None,
        "moe_act": model.num_experts is not None,
        "shared_experts": model.num_shared_experts > 0,
        "mla_up_proj": model.kv_lora_rank is not None,
    }
    return tuple(name for name, there in present.items() if there)


def _text(value: object, labels: Mapping[str, str]) -> str:
    """Return the form value of an axis. Recomputed modules have separate check boxes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int):  # Rankings use `full` for FSDP's per_layer.
        return "per_layer" if value == "full" and "per_layer" in labels else str(value)
    recompute = schema.to_dict(value)
    return "selective" if recompute.get("modules") else recompute_text(recompute)


def _numbers(value: int, known: Iterable[int]) -> dict[str, str]:
    return {str(number): f"{number:,}" for number in sorted({*known, value})}


def _powers(largest: int) -> list[int]:
    return [2**k for k in range(largest.bit_length())]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
