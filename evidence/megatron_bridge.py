"""Megatron Bridge's settings as columns of a training row."""

from __future__ import annotations

from typing import Any

FP8 = {
    "fp8_cs": ("fp8", "tensorwise"),
    "fp8_sc": ("fp8", "blockwise"),
    "fp8_ds": ("fp8", "delayed"),
    "fp8_mx": ("mxfp8", None),
}
"""(precision, scaling) by Megatron Bridge's name for the combination."""
DISPATCHERS = {"flex_deepep": "flex", "flex_hybridep": "flex"}
LLAMA_70B_LAYERS = 80
"""Number of layers of Llama 70B, the only model whose measured recipes offload layers."""
LORA = {"lora_rank": 16, "lora_target_modules": "linear_qkv"}


def megatron_knobs(
    *,
    dispatcher: str | None,
    overlaps_experts: bool | None,
    recompute_modules: str | None,
    graphs: str | None,
    graph_modules: str | None,
    offloaded_layers: int | None,
) -> dict[str, Any]:
    """Return the columns of a training row for these Megatron Bridge settings.

    `graph_modules` are recorded unless `graphs`, the implementation, is `none`.
    """
    records = graphs in ("local", "full_iteration") or (graphs != "none" and bool(graph_modules))
    offload = min(offloaded_layers / LLAMA_70B_LAYERS, 1.0) if offloaded_layers else None
    return {
        "overlap": "expert_parallel=true" if overlaps_experts else None,
        "cuda_graphs": records or None,
        "cuda_graph_modules": None if graph_modules == "full_iteration" else graph_modules or None,
        "offload": "activations" if offloaded_layers else None,
        "offload_fraction": offload,
        "recompute": f"selective {recompute_modules}" if recompute_modules else "none",
        "moe_token_dispatcher_type": DISPATCHERS.get(dispatcher or "", dispatcher) or None,
    }
