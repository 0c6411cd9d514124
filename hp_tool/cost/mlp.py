"""The dense MLP block."""

from hp_tool.cost.block import (
    EAGER_GATE,
    BlockBytes,
    BlockTime,
    Kernels,
    Shapes,
    eager_norm_traffic,
    unfused_bytes,
)
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.matrices import mlp_matrices
from hp_tool.cost.matrix import shapes
from hp_tool.cost.precision import cast_traffic
from hp_tool.cost.roofline import elementwise_seconds, weight_matmuls
from hp_tool.domain.frameworks import fuses_kernels
from hp_tool.domain.model import ModelSpec

KERNELS = Kernels(forward=4.0, backward=5.0)


def mlp_bytes(*, model: ModelSpec, s: Shapes) -> BlockBytes:
    """Return the activation bytes of the MLP block.

    These are the norm input, matmul input and dropout mask (sharded by SP, else replicated), the
    pre-activations and the activation output (split across tensor-parallel ranks), and the
    activated gate if the activation is not fused. If a fused kernel recomputes the product, it
    writes it again in the backward pass.
    """
    hidden = model.ffn_size / s.t
    gates = float(model.mlp_inputs)
    replicated = s.tokens * s.h * (s.e + s.saved_input + s.mask) / s.shards
    activated = s.e if model.gated_mlp and s.product and not s.facts.fused_activation else 0.0
    split = s.tokens * hidden * (gates * s.activation_input + activated + s.product)
    gathered, again = 1.0 + 2.0 * s.sharded, s.product == 0.0
    return BlockBytes(
        saved=replicated + split,
        norm_output=s.tokens * s.h * s.saved_input / s.shards,
        mlp=split,
        working=s.tokens * s.e * (gathered * s.h + (gates + 1.0 + again) * hidden),
    )


def mlp_time(*, case: TrainingCase, s: Shapes) -> BlockTime:
    """Return the time of the MLP block, in seconds: two or three matmuls, the norm, the activation
    function and the residual addition.
    """
    model, workload = case.model, case.workload
    hidden = model.ffn_size / s.t
    gates, again = float(model.mlp_inputs), s.product == 0.0
    matrices = shapes(mlp_matrices(model, tensor=s.t))
    matmul, weight_gradient = weight_matmuls(
        s.tokens, matrices, case=case, precision=workload.precision
    )
    cast, cast_backward = cast_traffic(workload, matrices)
    forward = s.tokens * (
        s.h * (5.0 * s.e + s.mask) / s.shards + (gates + 1.0) * s.e * hidden + cast
    )
    backward = s.tokens * (
        s.h * (8.0 * s.e + s.mask) / s.shards
        + (2.0 * gates + 1.0 + again) * s.e * hidden
        + cast_backward
    )
    if not fuses_kernels(workload):
        split = gates * hidden if model.has_mlp_bias else 0.0
        norm, norm_backward = eager_norm_traffic(model, s)
        gated = s.tokens * hidden * model.gated_mlp
        forward = forward + unfused_bytes(s=s, split=split, bias=model.has_mlp_bias)
        forward = forward + norm + EAGER_GATE[0] * gated
        backward = backward + norm_backward + EAGER_GATE[1] * gated
    return BlockTime(
        matmul=matmul,
        weight_gradient=weight_gradient,
        elementwise=elementwise_seconds(forward, machine=case, kernels=KERNELS.forward),
        elementwise_backward=elementwise_seconds(backward, machine=case, kernels=KERNELS.backward),
    )
