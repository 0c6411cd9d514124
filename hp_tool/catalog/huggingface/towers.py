"""Count the parameters of vision and audio towers."""

from collections.abc import Mapping
from typing import Any

Tower = Mapping[str, Any]

_DEPTH = ("num_hidden_layers", "depth", "encoder_layers", "vt_num_hidden_layers")
_WIDTH = ("embed_dim", "d_model", "hidden_size", "vt_hidden_size")
_INNER = ("intermediate_size", "encoder_ffn_dim", "vt_intermediate_size")
_GATED = ("qwen2_5_vl", "pixtral", "gemma4_vision", "glm4v")
"""Prefixes of model types whose MLPs have three matrices; others have two."""
_ONE_MATRIX = ("siglip", "gemma")
"""Prefixes of model types with one matrix between the tower and the language model; others have
two.
"""
_MAX_LAYERS = 1 << 20


def find_towers(parts: Mapping[str, Any]) -> dict[str, Tower]:
    """Return the parts of a config.json that are towers, by key. A tower has a depth and a
    width.
    """
    every = {name: part for name, part in parts.items() if isinstance(part, Mapping)}
    return {
        name: part
        for name, part in every.items()
        if _first_size(part, _DEPTH) and _first_size(part, _WIDTH)
    }


def describe_tower(name: str, tower: Tower) -> str:
    """Return a description such as `vision_config (siglip_vision_model, 27 layers of 1152)`."""
    depth = f"{_first_size(tower, _DEPTH)} layers of {_first_size(tower, _WIDTH)}"
    return f"{name} ({', '.join(filter(None, (tower.get('model_type'), depth)))})"


def tower_parameters(tower: Tower, *, into: int) -> int:
    """Return the approximate number of weights in a tower and its projection to width `into`.

    For width h, MLP width f and m patches per token, it is the sum of L (4 h^2 + 2 h f), patches,
    positions, and projections. For gated MLPs, 3 h f replaces 2 h f. Each projection has (m h)^2 +
    m h `into` weights, or h `into` + `into`^2 if patches are not merged. Biases and norms are
    omitted.
    """
    kind, into = str(tower.get("model_type")), _first_size(tower, ("out_hidden_size",)) or into
    depth, width = _first_size(tower, _DEPTH), _first_size(tower, _WIDTH)
    inner = _first_size(tower, _INNER) or int(width * _mlp_ratio(tower))
    # In glm4v, `intermediate_size` is the width of the projection after the tower. The MLPs inside
    # the tower have its output width.
    if kind.startswith("glm4v"):
        inner = into
    layers = depth * (4 * width**2 + (3 if kind.startswith(_GATED) else 2) * width * inner)
    patch = (
        3
        * _first_size(tower, ("patch_size",)) ** 2
        * (_first_size(tower, ("temporal_patch_size",)) or 1)
    )
    positions = _first_size(tower, ("num_position_embeddings", "position_embedding_size"))
    return (
        layers
        + width * (patch + positions)
        + _projections(tower, kind=kind, width=width, into=into)
    )


def _projections(tower: Tower, *, kind: str, width: int, into: int) -> int:
    side, kernel = _first_size(tower, ("spatial_merge_size",)), tower.get("merge_kernel_size")
    if kernel == [2, 2]:
        side = 2
    merged = width * max(side, 1) ** 2
    if kind.startswith("glm4v"):
        return merged * into + into**2 + 3 * into * _first_size(tower, _INNER)
    if side > 1:
        several = tower.get("deepstack_visual_indexes")
        return (1 + (len(several) if isinstance(several, list) else 0)) * (
            merged**2 + merged * into
        )
    return width * into + (0 if kind.startswith(_ONE_MATRIX) else into**2)


def _first_size(tower: Tower, names: tuple[str, ...]) -> int:
    """Return the value of the first key in `names` that has a positive integer; 0 if there is
    none.
    """
    return next(
        (
            value
            for name in names
            if isinstance(value := tower.get(name), int) and 0 < value <= _MAX_LAYERS
        ),
        0,
    )


def _mlp_ratio(tower: Tower) -> float:
    value = tower.get("mlp_ratio")
    return float(value) if isinstance(value, int | float) and 0 < value < 64 else 4.0
