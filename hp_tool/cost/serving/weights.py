"""Number formats of served weights: bytes with their scales, and the precision the hardware multiplies in."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import InputError

ServingPrecision = Precision | Literal["int8", "int4"]

_FORMATS: dict[str, tuple[float, Precision]] = {
    "fp32": (4.0, "fp32"),
    "bf16": (2.0, "bf16"),
    "fp16": (2.0, "fp16"),
    "fp8": (1.0, "fp8"),
    "mxfp8": (1.0 + 1.0 / 32, "mxfp8"),  # one scale byte for 32 weights
    "nvfp4": (0.5 + 1.0 / 16, "nvfp4"),  # one fp8 scale for 16 weights
    "int8": (1.0, "bf16"),  # weights alone: activations stay 16 bit
    "int4": (0.5 + 2.0 / 128, "bf16"),  # one 16-bit scale for a group of 128, as GPTQ and AWQ ship
}
_WEIGHT_ONLY = ("fp8", "mxfp8", "nvfp4")
"""Served on older hardware too: weights stay narrow in memory and are widened before the matmul."""


def weight_format(precision: ServingPrecision, *, gpu: GpuSpec) -> tuple[float, Precision]:
    """(bytes of one weight, precision of the matmul). Raises InputError where the hardware cannot multiply in it."""
    stored, compute = _FORMATS[precision]
    known = gpu.peak_flops_per_second
    if compute in known:
        return stored, compute
    if compute in _WEIGHT_ONLY or compute == "bf16":
        for wide in ("bf16", "fp16", "fp32"):
            if wide in known and (wide != "fp32" or gpu.kind == "cpu"):
                return (stored if compute in _WEIGHT_ONLY or stored < 2.0 else 2.0), wide
    raise InputError(
        f"{gpu.name} does not support {precision}; it supports {', '.join(sorted(known))}",
        field="inference.precision",
        code="precision_unsupported",
    )


# The weight matrices of one layer on one rank: what a forward pass reads and multiplies.
#
# Letters: h hidden, a query heads of width d, k key/value heads, f MLP width, t tensor-parallel size.


Matrix = tuple[FloatArray | float, FloatArray | float]
"""(outputs n, inputs k)."""


def attention_matrices(model: ModelSpec, t: IntArray) -> tuple[Matrix, ...]:
    """Projections before and after attention. Heads are split t ways; with fewer key/value heads than ranks each rank keeps
    one. Latent attention keeps its down-projections whole on every rank (arXiv 2405.04434, section 2.1).
    """
    h, heads = float(model.hidden_size), model.num_attention_heads / t
    if model.kv_lora_rank is None:
        d = model.head_size
        query, key_value = heads * d, d * np.maximum(model.kv_heads / t, 1.0)
        return (query + 2.0 * key_value, h), (h, query)
    rank, nope, rope, value = float(model.kv_lora_rank), *_latent_heads(model)
    query_width = heads * (nope + rope)
    latent = rank + rope
    before: tuple[Matrix, ...] = (
        ((query_width + latent, h),)
        if model.q_lora_rank is None
        else ((model.q_lora_rank + latent, h), (query_width, float(model.q_lora_rank)))
    )
    return *before, (heads * (nope + value), rank), (h, heads * value)


def mlp_matrices(model: ModelSpec, width: FloatArray | float) -> tuple[Matrix, Matrix]:
    """Up (with its gate, if any) and down projection of an MLP `width` wide on this rank."""
    h = float(model.hidden_size)
    return ((2.0 if model.gated_mlp else 1.0) * width, h), (h, width)


def weights(matrices: tuple[Matrix, ...]) -> FloatArray:
    """Weights of all of them."""
    total: FloatArray = sum((np.asarray(n) * k for n, k in matrices), np.asarray(0.0))
    return total


def moe_width(model: ModelSpec) -> int:
    """Width of one routed expert."""
    return model.moe_intermediate_size if model.moe_intermediate_size is not None else model.ffn_size


def moe_layers(model: ModelSpec) -> int:
    """Layers whose MLP is a mixture of experts."""
    return model.num_hidden_layers - model.first_k_dense_replace if model.num_experts else 0


def cached_width(model: ModelSpec, t: IntArray) -> FloatArray:
    """Numbers cached per token and layer on one rank: 2 k d / t, at least one head; latent attention caches rank + rope, whole
    on every rank.
    """
    if model.kv_lora_rank is not None:
        return np.full(t.shape, float(model.kv_lora_rank + (model.qk_rope_head_dim or 0)))
    return 2.0 * model.head_size * np.maximum(model.kv_heads / t, 1.0)


def attention_flops(model: ModelSpec, t: IntArray, *, decoding: bool) -> FloatArray:
    """FLOPs per query token and key it sees: 4 a d / t. Latent attention decodes in the latent space, where a head is
    rank (+ rope) wide, and prefills with expanded heads.
    """
    heads = model.num_attention_heads / t
    if model.kv_lora_rank is None:
        return 4.0 * heads * model.head_size
    nope, rope, value = _latent_heads(model)
    width = 2.0 * model.kv_lora_rank + rope if decoding else nope + rope + value
    return 2.0 * heads * width


def _latent_heads(model: ModelSpec) -> tuple[float, float, float]:
    """(nope, rope, value) widths of a latent-attention head."""
    nope = model.qk_nope_head_dim if model.qk_nope_head_dim is not None else model.head_size
    return float(nope), float(model.qk_rope_head_dim or 0), float(model.v_head_dim or nope)
