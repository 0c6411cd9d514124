"""The attention block: projections (MHA, GQA or latent attention), the attention core, and context
parallelism.
"""

from hp_tool.cost.arrays import Floats, Ints, anywhere, gcd, maximum, minimum
from hp_tool.cost.block import (
    EAGER_ROTARY,
    BlockBytes,
    BlockTime,
    Kernels,
    Shapes,
    eager_norm_traffic,
    unfused_bytes,
)
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.matrices import attention_matrices, kv_heads, query_heads
from hp_tool.cost.matrix import shapes
from hp_tool.cost.network import Group, all_to_all_seconds, dense_group, group_ring, split
from hp_tool.cost.precision import cast_traffic
from hp_tool.cost.roofline import (
    additive_seconds,
    elementwise_seconds,
    matmul_seconds,
    peak_flops,
    weight_matmuls,
)
from hp_tool.cost.sparse_attention import chosen_core_seconds, index_bytes
from hp_tool.domain.frameworks import fuses_kernels
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import Strategy
from hp_tool.domain.workload import TrainingWorkload

KERNELS = Kernels(forward=3.0, backward=5.0)
RING = Kernels(forward=3.0, backward=3.0)
"""Elementwise kernels that ring attention launches once per pass: filling the key/value buffer,
storing the first output, and the softmax statistics.
"""
RING_STEP = Kernels(forward=3.0, backward=4.0)
"""Elementwise kernels of each ring step after the first: a copy, and the accumulation of statistics
and outputs or of gradients.
"""

EXPOSED_COPIES = 4.0
"""Number of copies per pass that do not overlap with an all-to-all between sequence and head
sharding.
"""


def attention_bytes(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockBytes:
    """Return the activation bytes of the attention block.

    `saved`: norm input, matmul input and dropout mask (replicated, or sharded by sequence
    parallelism); Q, K, V and the core's output (split by heads); latents; a second copy of the
    output if context parallelism exchanges it before its projection. V shares its storage with the
    queries and keys before rotary embedding. That storage stays allocated if V is read from it, as
    in unfused attention or with a recomputed core. Otherwise Transformer Engine copies V
    (get_qkv_layout). Query and key norms always save that storage. With several groups per rank,
    they also save the concatenated queries.

    `core`: bytes that selective recomputation frees. With unfused attention these are the scores,
    5as^2b/t with dropout (softmax, mask, dropped softmax) and 2as^2b/t without. With fused
    attention it is only the fp32 log-sum-exp, 4asb/t, from which the backward pass recomputes them.
    """
    model = case.model
    qk, v = model.qk_head_size, model.v_head_size
    heads, keys = query_heads(model, s.t), kv_heads(model, s.t)
    replicated = s.tokens * s.h * (s.e + s.saved_input + s.mask) / s.shards
    split = s.tokens * s.e * (heads * (qk + v) + keys * (qk + v))
    if (
        s.saved_input < s.e
        # The output projection saves a quantised copy of its input, and the core saves it in 16
        # bits.
    ):
        split = split + s.tokens * s.saved_input * heads * v
    elif case.strategy.context_parallel_communication in ("a2a", "a2a+p2p"):
        split = split + s.tokens * s.e * heads * v * (candidates.context_parallel_size > 1)
    unrotated: Floats = 0.0
    up_projected: Floats = 0.0
    core = core_bytes(workload=case.workload, s=s, heads=heads)
    if model.kv_lora_rank is not None:
        up_projected = s.tokens * s.e * heads * (2.0 * qk + v)
    elif model.query_key_norm is not None:
        fused = s.facts.fuses_queries_keys_values
        grouped = fused & (keys > 1) & (heads > keys)
        split = split + s.tokens * s.e * ((heads + keys) * qk + grouped * heads * qk)
        if case.workload.attention == "flash":
            core = core + fused * s.tokens * s.e * keys * v
    elif model.positions == "rotary" and s.facts.fuses_queries_keys_values:
        unrotated = s.tokens * s.e * (heads + keys) * qk
    if case.workload.attention == "flash":
        core = core - unrotated
    latent: Floats = 0.0
    if model.kv_lora_rank is not None:
        # Inputs of the latents' norms, and their outputs, which are the inputs of the
        # up-projections.
        latent = (
            s.tokens
            * (s.e + s.saved_input)
            * ((model.q_lora_rank or 0) + model.kv_lora_rank)
            / s.shards
        )
    if model.attention_output_gate is not None:  # the gate and its output
        gates = heads * (v if model.attention_output_gate == "channel" else 1)
        split = split + s.tokens * (s.e * gates + s.saved_input * heads * v)
    if model.index_topk is not None:
        split = split + index_bytes(model, s)
    gathered = s.tokens * s.h * s.e * (1.0 + s.sharded)
    return BlockBytes(
        saved=replicated + split + latent + unrotated,
        core=core,
        norm_output=s.tokens * s.h * s.saved_input / s.shards,
        up_projected=up_projected,
        working=gathered + s.tokens * s.e * (heads + keys) * (qk + v),
    )


def core_bytes(
    *, workload: TrainingWorkload, s: Shapes, heads: Floats, keys_per_query: float = 1.0
) -> Floats:
    """Return the bytes that the attention core saves: the fp32 log-sum-exp of each query, or the
    scores if attention is unfused.
    """
    if workload.attention == "flash":
        return 4.0 * s.tokens * heads
    return (
        s.tokens
        * (workload.sequence_length * keys_per_query)
        * heads
        * (2.0 * s.e + 1.0 if s.mask else s.e)
    )


def attention_time(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockTime:
    """Return the time in seconds of the attention block, forward and backward.

    Elementwise kernels of the forward pass: the norm reads and writes one tensor; the residual
    addition reads two tensors and a mask and writes one; rotary embeddings and query/key norms each
    read and write queries and keys. In the backward pass, norms read the gradient and the input and
    write the input gradient, and the residual's gradient is added to it.
    """
    model, workload = case.model, case.workload
    matrices = shapes(attention_matrices(model, tensor=s.t))
    matmul, weight_gradient = weight_matmuls(
        s.tokens, matrices, case=case, precision=workload.precision
    )
    core, core_backward = core_seconds(case=case, s=s)
    context, context_backward = context_seconds(case=case, candidates=candidates, s=s, core_s=core)
    qk = model.qk_head_size
    heads = (model.num_attention_heads + model.kv_heads) / s.t
    rotary = 2.0 * s.e * heads * qk if model.positions == "rotary" else 0.0
    normed = s.e * heads * qk if model.query_key_norm is not None else 0.0
    per_hidden, per_hidden_backward = 5.0 * s.e + s.mask, 8.0 * s.e + s.mask
    cast, cast_backward = cast_traffic(workload, matrices)
    forward = s.tokens * (s.h * per_hidden / s.shards + rotary + 2.0 * normed + cast)
    backward = s.tokens * (
        s.h * per_hidden_backward / s.shards + rotary + 3.0 * normed + cast_backward
    )
    if model.attention_output_gate is not None:
        gated = s.tokens * s.e * query_heads(model, s.t) * model.v_head_size
        forward, backward = forward + 3.0 * gated, backward + 5.0 * gated
    if not fuses_kernels(workload):
        split = projected_elements(model, s) if model.has_attention_bias else 0.0
        forward = forward + unfused_bytes(s=s, split=split, bias=model.has_attention_output_bias)
        norm, norm_backward = eager_norm_traffic(model, s)
        rotated = s.tokens * heads * qk * (model.positions == "rotary")
        forward = forward + norm + EAGER_ROTARY[0] * rotated
        backward = backward + norm_backward + EAGER_ROTARY[1] * rotated
    return BlockTime(
        matmul=matmul,
        weight_gradient=weight_gradient,
        core=core,
        core_backward=core_backward,
        elementwise=elementwise_seconds(forward, machine=case, kernels=KERNELS.forward),
        elementwise_backward=elementwise_seconds(backward, machine=case, kernels=KERNELS.backward),
        context=context,
        context_backward=context_backward,
    )


def projected_elements(model: ModelSpec, s: Shapes) -> Floats:
    """Return the number of query, key and value elements per token on one rank."""
    qk, v = model.qk_head_size, model.v_head_size
    return query_heads(model, s.t) * qk + kv_heads(model, s.t) * (qk + v)


def core_seconds(
    *, case: TrainingCase, s: Shapes, keys_per_query: float = 1.0, causal: bool | None = None
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) seconds of the attention core: scores, softmax, dropout and
    the product with V.

    `keys_per_query` is the ratio of keys to queries in cross-attention. `causal` defaults to
    whether the model's attention is causal.
    """
    model, workload, profile = case.model, case.workload, case.profile
    if model.index_topk is not None:
        return chosen_core_seconds(case=case, s=s)
    gpu, length = case.cluster.gpu, float(workload.sequence_length)
    keys = length * keys_per_query
    heads = query_heads(model, s.t)
    qk, v = model.qk_head_size, model.v_head_size
    if workload.attention == "flash":
        visible = 0.5 if (model.architecture == "decoder" if causal is None else causal) else 1.0
        flops = 2.0 * s.tokens * (s.attended * keys_per_query) * heads * (qk + v) * visible
        traffic = s.tokens * s.e * (heads + kv_heads(model, s.t) * keys_per_query) * (qk + v)
        # Attention runs in 16 bits even if the matmuls are quantised.
        peak = peak_flops(
            gpu, precision=workload.precision if workload.precision in ("fp16", "fp32") else "bf16"
        )
        forward = additive_seconds(flops, traffic, profile.gpu.attention, gpu=gpu, peak=peak)
        if profile.framework.attention_slowdown != 1.0:
            forward = forward * profile.framework.attention_slowdown
        # The backward pass has five matmuls, the forward pass two.
        return forward, 2.5 * forward * profile.framework.attention_backward_slowdown
    # Unfused: two batched matmuls over all scores, and kernels that read and write the scores.
    batch = s.tokens / length * heads
    scores = s.tokens * keys * heads
    precision = workload.precision if workload.precision in ("fp16", "fp32") else "bf16"
    matmuls = matmul_seconds(length, keys, qk, machine=case, precision=precision, batch=batch)
    matmuls = matmuls + matmul_seconds(
        length, v, keys, machine=case, precision=precision, batch=batch
    )
    # Softmax reads and writes; dropout reads, writes and stores its mask. Backward softmax reads
    # two tensors and writes one.
    dropout = s.mask * (2.0 * s.e + 1.0)
    moved, moved_backward, kernels, kernels_backward = (
        2.0 * s.e + dropout,
        3.0 * s.e + dropout,
        2.0,
        2.0,
    )
    copies: Floats = 0.0
    if not fuses_kernels(workload):
        # Scaling, masking and subtracting the masked part each read and write the scores; the last
        # has no backward kernel. Batched matmuls copy queries, keys and values by head, and their
        # gradients are concatenated.
        moved, moved_backward, kernels, kernels_backward = (
            moved + 6.0 * s.e,
            moved_backward + 4.0 * s.e,
            8.0,
            7.0,
        )
        copies = 2.0 * s.e * s.tokens * projected_elements(model, s)
    softmax = elementwise_seconds(scores * moved + copies, machine=case, kernels=kernels)
    softmax_backward = elementwise_seconds(
        scores * moved_backward + copies, machine=case, kernels=kernels_backward
    )
    return matmuls + softmax, 2.0 * matmuls + softmax_backward


# Context parallelism: exchange of keys and values between the ranks that share a sequence, and its
# overlap.


def context_seconds(
    *, case: TrainingCase, candidates: Candidates, s: Shapes, core_s: Floats
) -> tuple[Floats, Floats]:
    """Return the exposed (forward, backward) seconds of context-parallel communication per layer
    and micro-batch.

    - p2p (ring attention): the keys and values of the other ranks arrive in c - 1 steps, each
      overlapped with the attention of the previous step; the backward pass also sends their
      gradients. Each step is a separate attention kernel with its fixed cost and copies, and its
      result is added to the others' (`ring_merge_seconds`).
    - all_gather: keys and values are gathered first, without overlap; the backward pass gathers
      them again and reduce-scatters the gradients.
    - a2a (Ulysses): all-to-alls convert queries, keys, values and the output from sequence sharding
      to head sharding and back (`head_exchange_seconds`).
    - a2a+p2p: Ulysses among u neighbouring ranks, then ring attention over c / u. After the
      all-to-all, each rank has u times as many tokens and 1/u of the heads.

    Each rank has one early and one late chunk of the sequence, which balances the causal load
    (Megatron Core, Transformer Engine).
    """
    model = case.model
    c: Ints = candidates.context_parallel_size
    if not anywhere(c > 1):
        return 0.0, 0.0
    head = float(model.head_size)
    kv = s.tokens * s.e * 2.0 * head * maximum(model.kv_heads / s.t, 1.0)
    ranks = dense_group(candidates, "cp", cluster=case.cluster)
    kind = case.strategy.context_parallel_communication
    exchange: Floats = 0.0
    exchange_backward: Floats = 0.0
    if kind in ("a2a", "a2a+p2p"):
        u = (
            c
            if kind == "a2a"
            else head_exchange_ranks(ranks, model=model, strategy=case.strategy, heads_split=s.t)
        )
        inner, outer = split(ranks, c // u)
        exchange, exchange_backward = head_exchange_seconds(
            case=case, group=inner, queries=_query_bytes(case, s), keys=kv / 2.0
        )
        if kind == "a2a":
            return exchange, exchange_backward
        ranks, c = outer, c // u
        kv = s.tokens * u * s.e * 2.0 * head * maximum(model.kv_heads / (s.t * u), 1.0)
    passing = group_ring(machine=case, group=ranks).seconds(kv * (c - 1.0))
    if kind == "all_gather":
        return passing, 2.0 * passing
    overlap = case.profile.framework.context_parallel_overlap
    kernels = case.profile.gpu.attention.overhead_s * (c - 1.0)
    forward = passing - overlap * minimum(passing, core_s * (c - 1.0) / c)
    backward = 2.0 * passing - overlap * minimum(2.0 * passing, 2.5 * core_s * (c - 1.0) / c)
    merged, merged_backward = ring_merge_seconds(case=case, s=s, steps=c, keys_values=kv)
    return (
        exchange + kernels + forward + merged,
        exchange_backward + kernels + backward + merged_backward,
    )


def head_exchange_seconds(
    *, case: TrainingCase, group: Group, queries: Floats, keys: Floats
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) seconds of the all-to-alls between sequence and head sharding.

    `queries` and `keys` are the bytes of one rank's queries and keys. The output is as large as the
    queries, and the values are as large as the keys. The forward pass exchanges queries, keys,
    values and output, one after the other. The backward pass exchanges the output again, its
    gradient, and the gradients of queries, keys and values.

    Each tensor is copied before and after its all-to-all. The copies of one tensor overlap with the
    all-to-all of the next, so only the copies before the first and after the last all-to-all of a
    sequence are exposed. In the forward pass, these are the copies of queries, values and (both
    copies) output. In the backward pass, they are the copies of the output, its gradient, and the
    gradients of queries and values. Source: Transformer Engine, AttnFuncWithCPAndQKVOA2A and
    flash_attn_a2a_communicate.
    """
    ranks = group.size
    several = ranks > 1
    sent = (ranks - 1.0) / ranks
    wide = all_to_all_seconds(queries * sent, machine=case, group=group)
    narrow = all_to_all_seconds(keys * sent, machine=case, group=group)
    copies = elementwise_seconds(
        several * 2.0 * (3.0 * queries + keys), machine=case, kernels=several * EXPOSED_COPIES
    )
    return 2.0 * wide + 2.0 * narrow + copies, 3.0 * wide + 2.0 * narrow + copies


def _query_bytes(case: TrainingCase, s: Shapes) -> Floats:
    return s.tokens * s.e * query_heads(case.model, s.t) * case.model.v_head_size


def ring_merge_seconds(
    *, case: TrainingCase, s: Shapes, steps: Ints, keys_values: Floats
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) seconds of ring attention outside its `steps` attention
    kernels.

    Keys and values are copied to one buffer. Each step except the first copies half of the queries,
    or half of the keys and values. Its output is rescaled and added to the previous outputs: three
    passes over three quarters of the queries on average. In the backward pass, each step copies
    half of the output, its gradient and the queries, and then accumulates the query gradients in
    the same way. Gradients of keys and values are sent around the ring and summed. `keys_values` is
    their size in bytes. Source: Transformer Engine, AttnFuncWithCPAndKVP2P.
    """
    further_steps = steps - 1.0
    several = steps > 1
    queries = _query_bytes(case, s)
    forward = several * (4.0 * queries + 2.0 * keys_values) + further_steps * (
        2.75 * queries + 0.5 * keys_values
    )
    backward = several * (2.0 * queries + 3.5 * keys_values) + further_steps * (
        3.75 * queries + 3.75 * keys_values
    )
    return (
        elementwise_seconds(
            forward,
            machine=case,
            kernels=several * RING.forward + further_steps * RING_STEP.forward,
        ),
        elementwise_seconds(
            backward,
            machine=case,
            kernels=several * RING.backward + further_steps * RING_STEP.backward,
        ),
    )


def head_exchange_ranks(
    ranks: Group, *, model: ModelSpec, strategy: Strategy, heads_split: Ints
) -> Ints:
    """Return u, the number of ranks in the inner (Ulysses) level of a2a+p2p."""
    size = ranks.size
    if strategy.hierarchical_context_parallel_sizes is not None:
        return minimum(strategy.hierarchical_context_parallel_sizes[0], size)
    ranks_in_domain = gcd(ranks.in_domain, size)
    return gcd(ranks_in_domain, model.num_attention_heads // heads_split)
