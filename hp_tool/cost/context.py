"""Context parallelism: how keys and values travel between the ranks that share a sequence, and what hides it."""

from __future__ import annotations

from typing import Any

from hp_tool.cost.candidates import Candidates, FloatArray
from hp_tool.cost.communication import all_to_all_seconds, group_ring
from hp_tool.cost.elementwise import anywhere, maximum, minimum
from hp_tool.cost.placement import dense_group
from hp_tool.cost.shapes import Shapes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import Strategy


def context_seconds(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    strategy: Strategy,
    profile: EfficiencyProfile,
    candidates: Candidates,
    s: Shapes,
    core_s: FloatArray,
) -> tuple[FloatArray | float, FloatArray | float]:
    """(forward, backward) exposed seconds per layer and micro-batch.

    p2p (ring attention): keys and values of every other rank pass by, in c - 1 steps, each hidden behind the attention of
    the step before; backward also carries their gradients. all_gather: keys and values are gathered first, which nothing
    hides; backward gathers them again and reduce-scatters the gradients. a2a (Ulysses): queries, keys, values and the
    output change from sequence to head shards, four all-to-alls of 1/c of a tensor each way. The causal load is balanced
    by giving each rank one early and one late piece of the sequence (Megatron Core, TE).
    """
    c = candidates.context_parallel_size
    if not anywhere(c > 1):
        return 0.0, 0.0
    head = float(model.head_size)
    kv = s.tokens * s.e * 2.0 * head * maximum(model.kv_heads / s.t, 1.0)
    ranks = dense_group(candidates, "cp", order=cluster.rank_order)
    group: dict[str, Any] = {"group": ranks, "cluster": cluster, "profile": profile}
    kind = strategy.context_parallel_communication
    if kind == "a2a":
        query = s.tokens * s.e * 2.0 * head * model.num_attention_heads / s.t
        exchange = all_to_all_seconds((kv + query) * (c - 1.0) / c, **group)
        return exchange, exchange
    passing = group_ring(**group).seconds(kv * (c - 1.0))
    if kind == "all_gather":
        return passing, 2.0 * passing
    overlap = profile.framework.context_parallel_overlap
    forward = passing - overlap * minimum(passing, core_s * (c - 1.0) / c)
    backward = 2.0 * passing - overlap * minimum(2.0 * passing, 2.5 * core_s * (c - 1.0) / c)
    return forward, backward
