"""Activation recomputation of a layer: the whole of it, or every operation but those that are dear."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.parallel import recompute_name

_aten = torch.ops.aten
_MATMUL = _aten.mm.default
_KEPT = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def apply(layer: nn.Module, request: ProfileRequest) -> None:
    """per_layer keeps a layer's input alone; per_op keeps attention, reduce-scatters and every second matmul (torchtitan)."""
    name = recompute_name(request.parallel.recompute)
    if name == "none":
        return
    contexts: dict[str, Any] = {"context_fn": _per_op} if name == "per_op" else {}
    layer.forward = partial(checkpoint, _unbound(layer), use_reentrant=False, **contexts)


def _unbound(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer's forward as it is now."""
    return layer.forward


def _per_op() -> Any:
    """Forward and recomputation see the same matmuls, so each counts its own."""
    counters = {False: itertools.count(), True: itertools.count()}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        second = operation == _MATMUL and next(counters[context.is_recompute]) % 2 == 1
        keep = operation in _KEPT or (operation == _MATMUL and not second)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
