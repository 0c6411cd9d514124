"""Cross attention: each layer of a decoder reads the encoder's output (arXiv 1910.10683, Megatron Core's T5).

Queries come from the decoder's T = s_d b / c tokens, keys and values from the encoder's r T, where r = s_e / s_d.
"""

from __future__ import annotations

from typing import Any

from hp_tool.cost.attention import core_bytes, core_seconds, head_widths
from hp_tool.cost.block import BlockBytes, BlockTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.communication import tensor_ring
from hp_tool.cost.compute import elementwise_seconds, weight_matmuls
from hp_tool.cost.elementwise import Column, maximum, minimum, where
from hp_tool.cost.lowprecision import cast_traffic
from hp_tool.cost.parameters import attention_matrices
from hp_tool.cost.shapes import Shapes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


def cross_bytes(*, model: ModelSpec, workload: TrainingWorkload, s: Shapes, ratio: float) -> BlockBytes:
    """Norm input, query projection's input and dropout mask (whole, or sharded by SP), queries and the core's output (split
    by heads), keys and values of the encoder's r T tokens. Their projection's input is the encoder's output, which all
    layers share: it is not counted here.
    """
    qk, v = head_widths(model)
    heads, kv_heads = model.num_attention_heads / s.t, maximum(model.kv_heads / s.t, 1.0)
    replicated = s.tokens * s.h * (s.e + s.saved_input + s.mask) / s.shards
    split = s.tokens * s.e * (heads * (qk + v) + ratio * kv_heads * (qk + v))
    if s.saved_input < s.e:  # as in self-attention
        split = split + s.tokens * s.saved_input * heads * v
    gathered = s.tokens * s.h * s.e * (1.0 + ratio) * where(s.sharded, 2.0, 1.0)
    return BlockBytes(
        saved=replicated + split,
        core=core_bytes(workload=workload, s=s, heads=heads, keys_per_query=ratio),
        working=gathered + split,
    )


def cross_time(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    s: Shapes,
    ratio: float,
) -> BlockTime:
    """Seconds of the block: no scores are masked causally; norm, residual and dropout as in self-attention."""
    qk, v = head_widths(model)
    heads, kv_heads = model.num_attention_heads / s.t, maximum(model.kv_heads / s.t, 1.0)
    matmul: dict[str, Any] = {"gpu": cluster.gpu, "profile": profile, "precision": workload.precision}
    own, read = [(heads * qk, s.h), (s.h, heads * v)], [(kv_heads * (qk + v), s.h)]
    forward, gradient = weight_matmuls(s.tokens, own, **matmul)
    forward_read, gradient_read = weight_matmuls(ratio * s.tokens, read, **matmul)
    core, core_backward = core_seconds(
        model=model, cluster=cluster, workload=workload, profile=profile, s=s, keys_per_query=ratio, causal=False
    )
    cast, cast_backward = cast_traffic(workload, own)
    cast_read, cast_read_backward = cast_traffic(workload, read)
    traffic = s.tokens * (s.h * (5.0 * s.e + s.mask) / s.shards + cast + ratio * cast_read)
    traffic_backward = s.tokens * (s.h * (8.0 * s.e + s.mask) / s.shards + cast_backward + ratio * cast_read_backward)
    return BlockTime(
        matmul=forward + forward_read,
        weight_gradient=gradient + gradient_read,
        core=core,
        core_backward=core_backward,
        elementwise=elementwise_seconds(traffic, kernels=3.0, gpu=cluster.gpu, profile=profile),
        elementwise_backward=elementwise_seconds(traffic_backward, kernels=5.0, gpu=cluster.gpu, profile=profile),
    )


def memory_read_seconds(
    *, cluster: ClusterSpec, profile: EfficiencyProfile, candidates: Candidates, s: Shapes, block: BlockTime, ratio: float
) -> tuple[Column, Column]:
    """Exposed (forward, backward) tensor-parallel seconds of the key/value projection's input, the encoder's output.

    With SP it is gathered in either pass and its gradient reduce-scattered; without, the gradient is all-reduced. In the
    backward pass both hide behind the weight-gradient matmuls as far as the framework's overlap goes.
    """
    group = tensor_ring(candidates=candidates, cluster=cluster, profile=profile)
    gather = group.seconds(ratio * s.tokens * s.h * s.e * (s.t - 1.0) / s.t)
    backward = where(s.sharded, 2.0 * gather, group.seconds(2.0 * ratio * s.tokens * s.h * s.e * (s.t - 1.0) / s.t))
    hidden = profile.framework.tensor_parallel_overlap * minimum(backward, block.weight_gradient)
    return where(s.sharded, gather, 0.0), backward - hidden


def cross_flops(model: ModelSpec, *, decoder_tokens: float, encoder_tokens: float) -> tuple[float, float]:
    """Forward FLOPs of one row in one block: (projections, scores and their product with the values)."""
    qk, v = head_widths(model)
    read = model.hidden_size * model.kv_heads * (qk + v)
    own = float(attention_matrices(model)) - read
    scores = 2.0 * decoder_tokens * encoder_tokens * model.num_attention_heads * (qk + v)
    return 2.0 * (own * decoder_tokens + read * encoder_tokens), scores
