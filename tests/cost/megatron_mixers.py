"""Megatron Core's recurrent mixers with kernels that keep what their sources keep, and compute
nothing: part of the program `megatron_layers`.

Sources: mamba_ssm 2.3 (ops/triton/ssd_combined.py, layernorm_gated.py), fla 0.6
(ops/gated_delta_rule/chunk.py, modules/norm/l2norm.py), causal_conv1d (its input). The gated norm
of a delta rule is compiled in Megatron Core: one kernel, which keeps its inputs.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

with patch.dict(
    sys.modules, {"triton": MagicMock(), "triton.language": MagicMock()}
):  # of inference alone, and no CPU has it
    from megatron.core.ssm import gated_delta_net, mamba_mixer
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules

CHUNK = 64


class _Kept(torch.autograd.Function):
    """The output of a kernel, which keeps its inputs and new tensors of the given shapes."""

    @staticmethod
    def forward(ctx: Any, shape: Any, extra: Any, *inputs: Any) -> torch.Tensor:
        ctx.save_for_backward(
            *inputs, *(inputs[0].new_empty(size, dtype=dtype) for size, dtype in extra)
        )
        return inputs[0].new_empty(shape)


def _scan(
    zxbcdt: Any, weight: Any, bias: Any, dt_bias: Any, a: Any, *, headdim: int, **more: Any
) -> torch.Tensor:
    shape = (*zxbcdt.shape[:2], len(dt_bias) * headdim)
    return _Kept.apply(shape, [(shape, zxbcdt.dtype)], zxbcdt, weight, bias, dt_bias, a, more["D"])


class _GatedNorm(torch.nn.Module):
    def __init__(self, width: int, *, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight, self.groups = (
            torch.nn.Parameter(torch.empty(width, dtype=torch.bfloat16)),
            width // group_size,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Kept.apply(x.shape, [((*x.shape[:-1], self.groups), torch.float32)], x, self.weight)


def _convolved(*, x: Any, weight: Any, bias: Any, activation: str) -> torch.Tensor:
    return _Kept.apply(x.shape, [], x, weight)


class _L2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        ctx.save_for_backward(output, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return output


def _chunked(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **_: Any) -> tuple[torch.Tensor, None]:
    summed, inverse = (g.shape, torch.float32), ((*g.shape, CHUNK), q.dtype)
    return _Kept.apply(v.shape, [summed, inverse], q, k, v, beta), None


def _gated(_: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return _Kept.apply(x.shape, [(x.shape[:-1], torch.float32)], x, gate)


mamba_mixer.HAVE_MAMBA_SSM = gated_delta_net.HAVE_FLA = True
mamba_mixer.mamba_split_conv1d_scan_combined = _scan
mamba_mixer.RMSNormGated = mamba_mixer.ExtendedRMSNorm = _GatedNorm
gated_delta_net.causal_conv1d_fn, gated_delta_net.l2norm = _convolved, _L2.apply
gated_delta_net.chunk_gated_delta_rule = _chunked
GatedDeltaNet._apply_gated_norm = _gated


class MambaLayers(torch.nn.Module):
    """Layers of Mamba 2 one after the other, called like a block of transformer layers."""

    def __init__(self, config: TransformerConfig, norm: type[torch.nn.Module], count: int) -> None:
        super().__init__()
        mixer = ModuleSpec(
            MambaMixer,
            submodules=MambaMixerSubmodules(
                in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
            ),
        )
        submodules = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=get_bias_dropout_add)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.layers = torch.nn.ModuleList(
            build_module(
                ModuleSpec(MambaLayer, submodules=submodules),
                config,
                layer_number=place + 1,
                pg_collection=groups,
            )
            for place in range(count)
        )

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def delta_mixer(norm: type[torch.nn.Module]) -> ModuleSpec:
    """A gated delta rule in place of a layer's attention."""
    submodules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear
    )
    return ModuleSpec(GatedDeltaNet, submodules=submodules)
