"""The mixture-of-experts block: router, dispatch, grouped matmuls, combine, shared experts.

After Megatron Core's dropless dispatcher: each rank routes its T/t tokens to k experts each, an all-to-all over the e_p
expert-parallel ranks brings them to their experts, expert tensor parallelism splits each expert's matrices. A rank holds
E/e_p experts; the busiest rank sees `imbalance` times the mean load.
"""

from __future__ import annotations

from typing import Any

from hp_tool.cost.block import BlockBytes, BlockTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.communication import exchange_seconds, group_ring
from hp_tool.cost.compute import elementwise_seconds, weight_matmuls
from hp_tool.cost.dispatch import travelling_copies
from hp_tool.cost.elementwise import Column, FloatArray, minimum
from hp_tool.cost.lowprecision import cast_traffic
from hp_tool.cost.placement import expert_group
from hp_tool.cost.shapes import Shapes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import Strategy
from hp_tool.domain.workload import TrainingWorkload


def expert_width(model: ModelSpec) -> float:
    """Width of one routed expert."""
    return float(model.moe_intermediate_size or model.ffn_size)


def activation_width(model: ModelSpec, candidates: Candidates) -> Column:
    """Width of one routed expert on one rank."""
    return expert_width(model) / candidates.expert_tensor_parallel_size


def shared_matrices(model: ModelSpec, s: Shapes) -> list[tuple[Column, Column]]:
    """(output n, input k) of the shared experts' matrices on one rank; they split like a dense MLP."""
    shared = model.shared_expert_size / s.t
    return [((2.0 if model.gated_mlp else 1.0) * shared, s.h), (s.h, shared)]


def routed_tokens(model: ModelSpec, workload: TrainingWorkload, candidates: Candidates, s: Shapes) -> FloatArray:
    """Token copies the busiest rank's experts work on: (T/t) k e_t times the imbalance, at most the capacity."""
    factor = workload.expert_imbalance
    if workload.expert_capacity_factor is not None:
        factor = min(factor, workload.expert_capacity_factor)
    return s.tokens / s.t * ((model.num_experts_per_tok or 1) * factor) * candidates.expert_tensor_parallel_size


def expert_bytes(*, model: ModelSpec, workload: TrainingWorkload, candidates: Candidates, s: Shapes) -> BlockBytes:
    """Norm and router input (16 bits: the router's matmul is wide), 8 bytes for each pair of token and expert (the fused
    permutation's map, two int32 each), permuted inputs of the experts, pre-activations and activations of routed and
    shared experts. Not counted: 32 bytes or so for each chosen pair, its probabilities and indices.
    """
    gates = 2.0 if model.gated_mlp else 1.0
    routed = routed_tokens(model, workload, candidates, s)
    width = activation_width(model, candidates)
    shared = model.shared_expert_size / s.t
    own = s.tokens / s.t
    router = own * (model.num_experts or 0) * 8.0
    replicated = s.tokens * s.h * (2.0 * s.e + s.mask) / s.shards
    experts = routed * (s.h * s.saved_input + width * (gates * s.e + s.saved_input))
    beside = s.tokens * shared * (gates * s.e + s.saved_input)
    return BlockBytes(
        saved=replicated + router + experts + beside,
        norm_output=s.tokens * s.h * s.e / s.shards,
        moe=router + experts + beside,
        expert_activations=routed * width * s.saved_input,
        shared_experts=beside,
        working=s.e * (routed * (2.0 * s.h + (gates + 1.0) * width) + 2.0 * s.tokens * s.h),
    )


def expert_time(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    strategy: Strategy,
    s: Shapes,
) -> BlockTime:
    """Seconds of the block. Two all-to-alls forward (dispatch, combine) and two backward; with expert tensor parallelism
    an all-gather and a reduce-scatter of the dispatched tokens beside each pair.
    """
    gpu, c = cluster.gpu, candidates
    ep, etp = c.expert_parallel_size, c.expert_tensor_parallel_size
    gates = 2.0 if model.gated_mlp else 1.0
    local_experts = (model.num_experts or 1) / ep
    routed = routed_tokens(model, workload, candidates, s)
    width = activation_width(model, c)
    matrices = [(gates * width, s.h), (s.h, width)]
    matmul: dict[str, Any] = {"gpu": gpu, "profile": profile, "precision": workload.precision}
    forward, gradient = weight_matmuls(routed / local_experts, matrices, batch=local_experts, **matmul)
    cast, cast_backward = cast_traffic(workload, matrices)
    if model.num_shared_experts:
        beside, beside_gradient = weight_matmuls(s.tokens, shared_matrices(model, s), **matmul)
        forward, gradient = forward + beside, gradient + beside_gradient

    # Permute (read, write) and un-permute (read, weighted sum) every copy; norm, residual and activation as in a dense MLP.
    moved = routed * s.h * s.e
    norm = s.tokens * s.h / s.shards
    active = routed * width * s.e
    traffic = norm * (5.0 * s.e + s.mask) + 4.0 * moved + (gates + 1.0) * active + routed * cast
    traffic_backward = norm * (8.0 * s.e + s.mask) + 5.0 * moved + (2.0 * gates + 1.0) * active + routed * cast_backward

    ranks = expert_group(c, "ep", order=cluster.rank_order)
    near, away = travelling_copies(model=model, cluster=cluster, group=ranks, dispatcher=strategy.moe_token_dispatcher_type)
    token = s.tokens / s.t * s.h * s.e
    exchange = exchange_seconds(token * near, token * away, group=ranks, cluster=cluster, profile=profile)
    around = group_ring(group=expert_group(c, "tp", order=cluster.rank_order), cluster=cluster, profile=profile)
    sent = token * (model.num_experts_per_tok or 1)
    communication = 2.0 * exchange + 2.0 * around.seconds(sent * (etp - 1.0))
    exposed = communication - profile.framework.expert_parallel_overlap * minimum(communication, forward)
    waiting = 0.5 * profile.framework.expert_overhead_s
    return BlockTime(
        matmul=forward,
        weight_gradient=gradient,
        elementwise=waiting + elementwise_seconds(traffic, kernels=16.0, gpu=gpu, profile=profile),
        elementwise_backward=waiting + elementwise_seconds(traffic_backward, kernels=20.0, gpu=gpu, profile=profile),
        expert=exposed,
        expert_backward=exposed,
    )
