"""The MoE block: router, dispatch, grouped matmuls, combine, shared experts.

Modelled on Megatron Core's dropless dispatcher. Each rank routes each of its T/t tokens to k
experts. An all-to-all over the e_p expert-parallel ranks sends the tokens to their experts. Expert
tensor parallelism splits the matrices of each expert. A rank has E/e_p experts. The busiest rank
has `imbalance` times the mean load.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hp_tool.cost.arrays import Bools, Floats, Ints, maximum, minimum, where
from hp_tool.cost.block import (
    EAGER_GATE,
    BlockBytes,
    BlockTime,
    Kernels,
    Shapes,
    eager_norm_traffic,
    unfused_bytes,
)
from hp_tool.cost.candidates import ALLTOALL, DISPATCHERS, DUALPIPE, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.matrices import expert_matrices, latent_matrices, shared_expert_matrices
from hp_tool.cost.matrix import shapes
from hp_tool.cost.network import Group, exchange_seconds, expert_group, group_ring
from hp_tool.cost.precision import FP8_BLOCK_SCALE_BYTES, cast_traffic, is_narrow, quantized_bytes
from hp_tool.cost.roofline import elementwise_seconds, weight_matmuls
from hp_tool.domain.frameworks import fuses_kernels
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import TokenDispatcher

KERNELS = Kernels(forward=16.0, backward=20.0)
TILE_ROWS = 128.0
"""Rows per thread block of a matmul. On average, half of a group's last tile is empty."""
COMMUNICATION_SHARE = 20.0 / 132.0
"""Fraction of the device's SMs that an overlapped exchange uses: 20 of 132 (arXiv 2412.19437
section 3.2.2).
"""


def routed_tokens(case: TrainingCase, candidates: Candidates, s: Shapes) -> Floats:
    """Return the number of token copies that the experts of the busiest rank process.

    The number is (T/t) k e_t times the imbalance, limited by the capacity.
    """
    workload = case.workload
    factor = workload.expert_imbalance
    if workload.expert_capacity_factor is not None:
        factor = min(factor, workload.expert_capacity_factor)
    return (
        s.tokens
        / s.t
        * ((case.model.num_experts_per_tok or 1) * factor)
        * candidates.expert_tensor_parallel_size
    )


def routed_width(model: ModelSpec) -> float:
    """Return the width, in elements, of the token vectors that are sent to routed experts."""
    return float(model.moe_latent_size or model.hidden_size)


def expert_bytes(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockBytes:
    """Return the activation bytes of the MoE block.

    Includes the norm and router input (16 bits, because the router's matmul is not quantised), 8
    bytes per pair of token and expert (two int32 in the map of the fused permutation), the permuted
    inputs of the experts, and the pre-activations and activations of routed and shared experts.
    Probabilities and indices, about 32 bytes per selected pair, are excluded.
    """
    model = case.model
    gates = float(model.mlp_inputs)
    routed = routed_tokens(case, candidates, s)
    width = model.expert_size / candidates.expert_tensor_parallel_size
    routed_input = s.saved_input
    if case.workload.expert_precision is not None:
        routed_input = (
            quantized_bytes(case.workload.of_experts)
            if is_narrow(case.workload.of_experts)
            else s.e
        )
    activated = s.e if model.gated_mlp and not s.facts.fused_activation else 0.0
    shared = model.shared_expert_size / s.t
    rank_tokens = s.tokens / s.t
    router = rank_tokens * (model.num_experts or 0) * 8.0
    replicated = s.tokens * s.h * (2.0 * s.e + s.mask) / s.shards
    travelling = routed_width(model)
    experts = routed * (
        travelling * routed_input + width * (gates * s.activation_input + activated + routed_input)
    )
    if model.moe_latent_size is not None:  # Input of the projection back to the hidden size.
        experts = experts + rank_tokens * travelling * s.saved_input
    shared_bytes = s.tokens * shared * (gates * s.activation_input + activated + s.saved_input)
    return BlockBytes(
        saved=replicated + router + experts + shared_bytes,
        norm_output=s.tokens * s.h * s.e / s.shards,
        moe=router + experts + shared_bytes,
        expert_activations=routed * width * routed_input,
        shared_experts=shared_bytes,
        working=s.e * (routed * (2.0 * travelling + (gates + 1.0) * width) + 2.0 * s.tokens * s.h),
    )


def expert_time(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockTime:
    """Return the time of the MoE block, in seconds."""
    return with_launches(
        expert_kernels(case=case, candidates=candidates, s=s), case=case, candidates=candidates
    )


def with_launches(block: BlockTime, *, case: TrainingCase, candidates: Candidates) -> BlockTime:
    """Return the block's seconds, including the time that the host needs to launch its kernels.

    Each pass includes half of the preparation of the dispatch, and the separate kernels of the
    experts.
    """
    framework = case.profile.framework
    alone = kernels_of_expert(case)
    each = framework.expert_launch_s * (
        (case.model.num_experts or 1) / candidates.expert_parallel_size
    )
    return replace(
        block,
        elementwise=0.5 * framework.expert_overhead_s + each * alone.forward + block.elementwise,
        elementwise_backward=0.5 * framework.expert_overhead_s
        + each * alone.backward
        + block.elementwise_backward,
    )


def expert_kernels(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockTime:
    """Return the time in seconds of the MoE block without waits for kernel launches.

    There are two all-to-alls in the forward pass (dispatch, combine) and two in the backward pass.
    With expert tensor parallelism, each pair adds an all-gather and a reduce-scatter of the
    dispatched tokens.
    """
    model, cluster, workload, profile = case.model, case.cluster, case.workload, case.profile
    c = candidates
    ep, etp = c.expert_parallel_size, c.expert_tensor_parallel_size
    gates = float(model.mlp_inputs)
    local_experts = (model.num_experts or 1) / ep
    routed = routed_tokens(case, candidates, s)
    width = model.expert_size / etp
    matrices = shapes(expert_matrices(model, expert=ep, expert_tensor=etp))
    of_experts = workload.of_experts
    forward, gradient = weight_matmuls(
        routed / local_experts + 0.5 * TILE_ROWS,
        matrices,
        case=case,
        precision=of_experts.precision,
        batch=local_experts,
    )
    cast, cast_backward = cast_traffic(of_experts, matrices)
    if model.num_shared_experts:
        shared_matmul, shared_gradient = weight_matmuls(
            s.tokens,
            shapes(shared_expert_matrices(model, tensor=s.t)),
            case=case,
            precision=workload.precision,
        )
        forward, gradient = forward + shared_matmul, gradient + shared_gradient

    if model.moe_latent_size is not None:
        shared_matmul, shared_gradient = weight_matmuls(
            s.tokens / s.t, shapes(latent_matrices(model)), case=case, precision=workload.precision
        )
        forward, gradient = forward + shared_matmul, gradient + shared_gradient

    # Permute (read, write) and un-permute (read, weighted sum) every copy, and sort copies that
    # arrive by ranks by experts and back; norm, residual and activation as in a dense MLP.
    moved = routed * routed_width(model) * s.e
    sorting = 4.0 * arrives_in_rank_order(case, c)
    norm = s.tokens * s.h / s.shards
    active = routed * width * s.e
    traffic = (
        norm * (5.0 * s.e + s.mask)
        + (4.0 + sorting) * moved
        + (gates + 1.0) * active
        + routed * cast
    )
    traffic_backward = (
        norm * (8.0 * s.e + s.mask)
        + (5.0 + sorting) * moved
        + (2.0 * gates + 1.0) * active
        + routed * cast_backward
    )
    if model.expert_bias:
        # The second bias, times a token's weight, is added in fp32 for each expert; backward sums
        # the gradients of both biases.
        traffic = traffic + 28.0 * routed * s.h
        traffic_backward = traffic_backward + routed * (40.0 * s.h + s.e * gates * width)
    if not fuses_kernels(workload):
        eager, eager_backward = eager_norm_traffic(model, s)
        traffic = traffic + unfused_bytes(s=s, split=0.0, bias=False)
        traffic = traffic + eager + EAGER_GATE[0] * routed * width * model.gated_mlp
        traffic_backward = (
            traffic_backward + eager_backward + EAGER_GATE[1] * routed * width * model.gated_mlp
        )

    ranks = expert_group(c, "ep", cluster=cluster)
    token = s.tokens / s.t * routed_width(model)
    sent_element_bytes = (
        1.0 + FP8_BLOCK_SCALE_BYTES if workload.dispatch_precision == "fp8" else s.e
    )
    exchange = _exchange_seconds(token * s.e, case=case, group=ranks, candidates=c)
    narrow = sent_element_bytes != s.e
    exchanges = exchange + (
        _exchange_seconds(token * sent_element_bytes, case=case, group=ranks, candidates=c)
        if narrow
        else exchange
    )
    around = group_ring(machine=case, group=expert_group(c, "tp", cluster=cluster))
    sent = token * s.e * (model.num_experts_per_tok or 1)
    communication = exchanges + 2.0 * around.seconds(sent * (etp - 1.0))
    exposed = communication - profile.framework.expert_parallel_overlap * minimum(
        communication, forward
    )
    return BlockTime(
        matmul=forward,
        weight_gradient=gradient,
        elementwise=elementwise_seconds(traffic, machine=case, kernels=KERNELS.forward),
        elementwise_backward=elementwise_seconds(
            traffic_backward, machine=case, kernels=KERNELS.backward
        ),
        expert=exposed,
        expert_backward=exposed,
    )


def _exchange_seconds(
    one_copy: Floats, *, case: TrainingCase, group: Group, candidates: Candidates
) -> Floats:
    """Return the time in seconds of one exchange in which each copy of a token has `one_copy`
    bytes.
    """
    codes, usual = candidates.moe_token_dispatcher_type, case.strategy.moe_token_dispatcher_type
    seconds: Floats = 0.0
    for code in np.unique(codes).tolist() if isinstance(codes, np.ndarray) else (codes,):
        ways = _dispatched_seconds(
            one_copy, case=case, group=group, dispatcher=DISPATCHERS[code] or usual
        )
        seconds = where(codes == code, ways, seconds)
    return seconds


def _dispatched_seconds(
    one_copy: Floats, *, case: TrainingCase, group: Group, dispatcher: TokenDispatcher
) -> Floats:
    if dispatcher == "allgather":
        return group_ring(machine=case, group=group).seconds(one_copy * (group.size - 1.0))
    near, away = travelling_copies(case=case, group=group, dispatcher=dispatcher)
    reached = case.profile.framework.dispatch_bandwidth_fraction if dispatcher == "flex" else None
    return exchange_seconds(
        one_copy * near, one_copy * away, machine=case, group=group, fraction=reached
    )


def arrives_in_rank_order(case: TrainingCase, c: Candidates) -> Bools:
    """Return whether token copies arrive ordered by sending rank instead of by expert. This is the
    case for alltoall with several local experts.

    Source: Megatron Core, MoEAlltoAllTokenDispatcher.sort_input_by_local_experts.
    """
    several = c.expert_parallel_size < (case.model.num_experts or 1)
    codes, usual = (
        c.moe_token_dispatcher_type,
        DISPATCHERS.index(case.strategy.moe_token_dispatcher_type),
    )
    by_ranks: Bools = (codes == ALLTOALL) | ((codes == 0) & (usual == ALLTOALL))
    return several & by_ranks


def kernels_of_expert(case: TrainingCase) -> Kernels:
    """Return the number of (forward, backward) kernels that are launched separately for each local
    expert, as in Transformer Engine's grouped linear.

    There are two matmuls in the forward pass and four in the backward pass. Below 16 bits, a
    reduction and a cast precede each input and each gradient. Experts with biases (`expert_bias`)
    multiply and add the second bias, and the backward pass reduces its gradient and that of the
    weights.
    """
    casts = 4.0 if is_narrow(case.workload.of_experts) else 0.0
    biased = 1.0 if case.model.expert_bias else 0.0
    return Kernels(forward=2.0 + casts + 2.0 * biased, backward=4.0 + casts + 8.0 * biased)


# Copies of a token that are sent to the experts' ranks, by link.
#
# alltoall (Megatron Core's dispatcher of that name, NCCL): one copy for each of the token's k
# experts. flex (DeepEP, HybridEP): one copy for each other node with any of these experts, and
# inside a node one for each such rank; results are summed on the way back, so combine moves the
# same amount (DeepEP, "normal kernels"; arXiv 2412.19437 section 3.2.2). allgather: every rank
# receives every token, by a ring, and combine is a reduce-scatter of the same size.


def travelling_copies(
    *, case: TrainingCase, group: Group, dispatcher: TokenDispatcher
) -> tuple[Floats, Floats]:
    """Return the mean number of copies of a token that a rank sends (inside its NVLink domain, to
    other domains).

    The router is assumed uniform. `group` has the e_p expert-parallel ranks, k of them in each of
    e_p / k domains.
    """
    model = case.model
    size = group.size
    k = group.in_domain
    if dispatcher == "alltoall":
        chosen = float(model.num_experts_per_tok or 1)
        return chosen * (k - 1.0) / size, chosen * (size - k) / size
    domains = size // k
    experts = model.num_experts or 1
    groups = model.n_group or 1
    used = functools.partial(
        expert_hit_probability,
        experts=experts,
        chosen=model.num_experts_per_tok or 1,
        groups=groups,
        kept=min(model.topk_group or groups, groups),
    )
    # A copy that arrives in a domain is on one of the k ranks; the others receive theirs over
    # NVLink.
    return domains * (k - 1.0) * _share_by_parts(size, used), (domains - 1.0) * _share_by_parts(
        domains, used
    )


@functools.lru_cache(maxsize=4096)
def expert_hit_probability(
    parts: int, *, experts: int, chosen: int, groups: int, kept: int
) -> float:
    """Return the probability that a token uses an expert in one of `parts` equal parts of the E
    experts.

    If k `chosen` of E experts are drawn uniformly, it is 1 - C(E - E/n, k) / C(E, k). Group-limited
    routing (DeepSeek) first draws `kept` of `groups` groups of neighbouring experts, and then k
    experts from these groups. Real routers do not draw groups uniformly: they prefer groups with
    high-scoring experts.
    """
    eligible = kept * experts // groups
    untouched = 0.0
    groups_in_part = max(groups // parts, 1)  # Number of groups in a part, at least one.
    for drawn in range(max(kept - (groups - groups_in_part), 0), min(groups_in_part, kept) + 1):
        weight = (
            math.comb(groups_in_part, drawn)
            * math.comb(groups - groups_in_part, kept - drawn)
            / math.comb(groups, kept)
        )
        experts_in_part = min(drawn * experts // groups, experts // parts)
        untouched += (
            weight
            * math.comb(max(eligible - experts_in_part, 0), chosen)
            / math.comb(eligible, chosen)
        )
    return 1.0 - untouched


def _share_by_parts(parts: Ints, share: Callable[[int], float]) -> Floats:
    if not isinstance(parts, np.ndarray):
        return share(int(parts))
    different, which = np.unique(parts, return_inverse=True)
    return np.array([share(int(one)) for one in different])[which]


# Overlap of all-to-alls of one micro-batch's experts with the opposite pass of another: Megatron
# Core's overlap_moe_expert_parallel_comm (pipeline_parallel/combined_1f1b.py), DualPipe. Overlapped
# exchanges use COMMUNICATION_SHARE of the concurrent arithmetic.


def overlap_with_other_pass(experts: BlockTime, *, attention: BlockTime) -> BlockTime:
    """Return the MoE block's costs if one micro-batch's forward pass is merged with another's
    backward pass.

    Each pass has two all-to-alls. One overlaps with the other pass's attention and one with the
    other pass's experts: exposed = sum over both of max(a2a - compute, 0). The forward dispatch
    overlaps with the experts' backward pass and the forward combine with the attention's backward
    pass. The backward all-to-alls overlap with the forward compute.
    """
    forward, backward = experts.expert / 2.0, experts.expert_backward / 2.0
    blocks = (attention, experts)
    return replace(
        experts,
        expert=sum(
            _exposed_exchange_seconds(forward, _backward_compute(block)) for block in blocks
        ),
        expert_backward=sum(
            _exposed_exchange_seconds(backward, _forward_compute(block)) for block in blocks
        ),
    )


def _exposed_exchange_seconds(exchange: Floats, compute: Floats) -> Floats:
    """Return how much an overlapped exchange slows the compute it overlaps with, in seconds."""
    hidden = minimum(exchange, compute)
    return exchange - (1.0 - COMMUNICATION_SHARE) * hidden


def merged_share(candidates: Candidates, *, micro_batches: Floats, merges: bool = True) -> Floats:
    """Return the fraction of passes that are merged with an opposite pass: 1 - ((v - 1) p + 1) / (m
    v).

    All passes are merged except those in the warm-up of the last pipeline rank. Without a pipeline,
    all but one of m passes are merged. DualPipe merges all passes of its first rank except 3 p / 2
    - 1. DualPipeV merges all except (3 p - 1) / 2, counting both chunks.
    """
    p, v = candidates.pipeline_parallel_size, candidates.virtual_pipeline_parallel_size
    share: Floats = (
        maximum(1.0 - ((v - 1.0) * p + 1.0) / (micro_batches * v), 0.0) if merges else 0.0
    )
    if candidates.merges_passes:
        dual = maximum(1.0 - (1.5 * p - 1.0 / v) / micro_batches, 0.0)
        share = where(candidates.pipeline_schedule >= DUALPIPE, dual, share)
    return share


def _forward_compute(block: BlockTime) -> Floats:
    return block.matmul + block.core + block.elementwise


def _backward_compute(block: BlockTime) -> Floats:
    return block.matmul + block.weight_gradient + block.core_backward + block.elementwise_backward
