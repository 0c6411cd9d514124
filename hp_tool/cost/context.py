"""Context parallelism: how keys and values travel between the ranks that share a sequence, and what hides it."""

from __future__ import annotations

from typing import Any

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.communication import all_to_all_seconds, group_ring
from hp_tool.cost.elementwise import Column, FloatArray, anywhere, gcd, maximum, minimum
from hp_tool.cost.placement import Group, dense_group, group_size, sharing, split
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
    output change from sequence to head shards, four all-to-alls of 1/c of a tensor each way. a2a+p2p: the former among u
    neighbouring ranks, after which each holds u times the tokens of 1/u of the heads, and the ring over c / u. The causal
    load is balanced by giving each rank one early and one late piece of the sequence (Megatron Core, TE).
    """
    c = candidates.context_parallel_size
    if not anywhere(c > 1):
        return 0.0, 0.0
    head = float(model.head_size)
    kv = s.tokens * s.e * 2.0 * head * maximum(model.kv_heads / s.t, 1.0)
    ranks = dense_group(candidates, "cp", order=cluster.rank_order)
    machine: dict[str, Any] = {"cluster": cluster, "profile": profile}
    kind = strategy.context_parallel_communication
    exchange: FloatArray | float = 0.0
    if kind in ("a2a", "a2a+p2p"):
        query = s.tokens * s.e * 2.0 * head * model.num_attention_heads / s.t
        u = c if kind == "a2a" else exchanging(model, ranks, cluster=cluster, strategy=strategy, heads_split=s.t)
        inner, outer = split(ranks, c // u)
        exchange = all_to_all_seconds((kv + query) * (u - 1.0) / u, group=inner, **machine)
        if kind == "a2a":
            return exchange, exchange
        ranks, c = outer, c // u
        kv = s.tokens * u * s.e * 2.0 * head * maximum(model.kv_heads / (s.t * u), 1.0)
    passing = group_ring(group=ranks, **machine).seconds(kv * (c - 1.0))
    if kind == "all_gather":
        return passing, 2.0 * passing
    overlap = profile.framework.context_parallel_overlap
    forward = passing - overlap * minimum(passing, core_s * (c - 1.0) / c)
    backward = 2.0 * passing - overlap * minimum(2.0 * passing, 2.5 * core_s * (c - 1.0) / c)
    return exchange + forward, exchange + backward


def exchanging(model: ModelSpec, ranks: Group, *, cluster: ClusterSpec, strategy: Strategy, heads_split: Column) -> Column:
    """Ranks u of the inner, exchanging level of a2a+p2p."""
    size = group_size(ranks)
    if strategy.hierarchical_context_parallel_sizes is not None:
        return minimum(strategy.hierarchical_context_parallel_sizes[0], size)
    together = gcd(sharing(ranks, block=cluster.nvlink_domain_size), size)
    return gcd(together, model.num_attention_heads // heads_split)
