"""Find the published training run of a recipe that is nearest to one whose model or GPU the recipe
does not list.
"""

from __future__ import annotations

import functools
import math

from hp_tool.catalog import gpu as catalogue_gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog import parameter_counts
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.recipe import Recipe

MAX_SIZE_RATIO = 1.25
"""Maximum ratio of the parameter counts of two models of one kind that get the same settings."""


def like_model(recipe: Recipe, model: ModelSpec) -> ModelSpec:
    """Return the recipe's model of the same kind with the nearest size; `model` itself if none is
    similar.

    Models are of one kind if they agree in having experts, latent attention and recurrent layers.
    """
    if not recipe.models or model.name in recipe.models:
        return model
    distances = {
        name: gap
        for name in recipe.models
        if _model_kind(listed := catalogue_model(name)) == _model_kind(model)
        and (gap := _size_ratio(_model_size(listed), _model_size(model)))
        <= math.log(MAX_SIZE_RATIO)
    }
    return catalogue_model(min(distances, key=lambda name: distances[name])) if distances else model


def like_gpu(recipe: Recipe, gpu: GpuSpec) -> GpuSpec:
    """Return the recipe's GPU with the same die, else with an NVLink domain of similar size, else
    with the nearest peak FLOP/s.
    """
    if not recipe.gpus or gpu.name in recipe.gpus:
        return gpu

    def distance(other: GpuSpec) -> tuple[bool, bool, bool, float]:
        peaks = (
            other.peak_flops_per_second.get("bf16", 1.0),
            gpu.peak_flops_per_second.get("bf16", 1.0),
        )
        differs_in_support = other.predict_only != gpu.predict_only
        return (
            differs_in_support,
            other.silicon != gpu.silicon or gpu.silicon is None,
            _exceeds_server(other) != _exceeds_server(gpu),
            _size_ratio(*peaks),
        )

    return min(map(catalogue_gpu, recipe.gpus), key=distance)


def describe_stand_in(recipe: Recipe, *, model: ModelSpec, gpu: GpuSpec) -> str | None:
    """Return a text that names the published model and GPU whose settings are used; None if the
    recipe lists the query's model and GPU.
    """
    model_like, gpu_like = like_model(recipe, model), like_gpu(recipe, gpu)
    words = []
    if recipe.models and model.name not in recipe.models:
        usual = "settings of most models of its kind"
        words.append(
            f"{model.name} is not listed: "
            f"{usual if model_like is model else f'settings of {model_like.name}'}"
        )
    if gpu_like is not gpu:
        words.append(f"{gpu.name} is not listed: settings of {gpu_like.name}")
    return f"{recipe.name}; {'; '.join(words)}" if words else None


@functools.lru_cache(maxsize=1024)
def _model_kind(model: ModelSpec) -> tuple[bool, bool, bool]:
    """Return whether the model has experts, latent attention, and recurrent layers."""
    recurrent = any(kind.is_recurrent for _, kind in model.kinds)
    return bool(model.num_experts), model.kv_lora_rank is not None, recurrent


@functools.lru_cache(maxsize=1024)
def _model_size(model: ModelSpec) -> int:
    return parameter_counts(model)["num_parameters"]


def _exceeds_server(gpu: GpuSpec) -> bool:
    """Return whether the GPU's NVLink domain is larger than a server of eight devices."""
    return (gpu.nvlink_domain_size or gpu.gpus_per_node) > 8


def _size_ratio(one: float, other: float) -> float:
    return abs(math.log(one / other))
