"""The dense MLP block."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_tool.cost.block import BlockBytes, BlockTime
from hp_tool.cost.compute import cast_traffic, elementwise_seconds, matmul_seconds
from hp_tool.cost.shapes import Shapes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


def mlp_bytes(*, model: ModelSpec, s: Shapes) -> BlockBytes:
    """Norm input, matmul input and dropout mask (whole, or sharded by SP); pre-activation(s) and activation (split)."""
    hidden = model.ffn_size / s.t
    gates = 2.0 if model.gated_mlp else 1.0
    replicated = s.tokens * s.h * (s.e + s.saved_input + s.mask) / s.shards
    split = s.tokens * hidden * (gates * s.e + s.saved_input)
    gathered = np.where(s.sharded, 2.0, 0.0) + 1.0
    return BlockBytes(saved=replicated + split, working=s.tokens * s.e * (gathered * s.h + (gates + 1.0) * hidden))


def mlp_time(*, model: ModelSpec, gpu: GpuSpec, workload: TrainingWorkload, profile: EfficiencyProfile, s: Shapes) -> BlockTime:
    """Seconds of the block: two or three matrices, the norm, the activation function, the residual."""
    hidden = model.ffn_size / s.t
    gates = 2.0 if model.gated_mlp else 1.0
    matmul: dict[str, Any] = {"gpu": gpu, "profile": profile, "precision": workload.precision}
    whole = np.full_like(s.t, s.h)
    n, k = np.stack((gates * hidden, whole)), np.stack((whole, hidden))
    cast, cast_backward = cast_traffic(workload.precision, inputs=k.sum(axis=0), outputs=n.sum(axis=0))
    forward = s.tokens * (s.h * (5.0 * s.e + s.mask) / s.shards + (gates + 1.0) * s.e * hidden + cast)
    backward = s.tokens * (s.h * (8.0 * s.e + s.mask) / s.shards + (2.0 * gates + 1.0) * s.e * hidden + cast_backward)
    return BlockTime(
        matmul=matmul_seconds(s.tokens, n, k, **matmul).sum(axis=0),
        weight_gradient=matmul_seconds(n, k, s.tokens, output_bytes=8.0, **matmul).sum(axis=0),
        elementwise=elementwise_seconds(forward, kernels=4.0, gpu=gpu, profile=profile),
        elementwise_backward=elementwise_seconds(backward, kernels=5.0, gpu=gpu, profile=profile),
    )
