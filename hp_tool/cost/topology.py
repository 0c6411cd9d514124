"""Where ranks lie: which ones form a group, and how many of those share an NVLink domain or a leaf switch.

Ranks count through the parallel dimensions in an order, innermost first, as Megatron Core's RankGenerator does. Dense
layers form the grid t c d p, experts the grid e_t e_p (t c d / (e_p e_t)) p over the same ranks: both in the same order,
the former without ep, the latter without cp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hp_tool.cost.arrays import Column, anywhere, gcd, maximum, minimum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.efficiency import Link
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.errors import InputError


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` ranks, each `stride` further on than the one before; plain numbers, or arrays of shape (n,)."""

    size: Column
    stride: Column


Group = tuple[Axis, ...]
"""The ranks of one group: all combinations of its axes, innermost first. Neighbouring dimensions are one axis."""


DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")


def checked_order(order: str) -> str:
    """A whole order of DIMENSIONS from one that a query writes; cp and ep, where left out, follow tp (Megatron-LM's
    --use-tp-pp-dp-mapping is tp-cp-ep-pp-dp). Raises InputError.
    """
    named = order.split("-")
    if len(set(named)) < len(named) or not {"tp", "dp", "pp"} <= set(named) <= set(DIMENSIONS):
        raise InputError(
            f"rank_order {order[:80]!r} must name each of tp, dp, pp (and cp, ep) once, innermost first, as in tp-cp-ep-dp-pp",
            field="parallel.rank_order",
        )
    place = named.index("tp") + 1
    named[place:place] = [name for name in ("cp", "ep") if name not in named]
    return "-".join(named)


def dense_group(candidates: Candidates, *names: str, order: str) -> Group:
    """The group over the dimensions `names` (tp, cp, dp, pp) of attention and dense layers."""
    c = candidates
    sizes = {
        "tp": c.tensor_parallel_size,
        "cp": c.context_parallel_size,
        "dp": c.data_parallel_size,
        "pp": c.pipeline_parallel_size,
    }
    return _group(sizes, names, order)


def expert_group(candidates: Candidates, *names: str, order: str) -> Group:
    """The group over the dimensions `names` (tp: experts' tensor parallelism, ep, dp: their replicas, pp) of experts."""
    c = candidates
    ranks = c.tensor_parallel_size * c.context_parallel_size * c.data_parallel_size
    sizes = {
        "tp": c.expert_tensor_parallel_size,
        "ep": c.expert_parallel_size,
        "dp": maximum(ranks // (c.expert_parallel_size * c.expert_tensor_parallel_size), 1),
        "pp": c.pipeline_parallel_size,
    }
    return _group(sizes, names, order)


def line(size: Column, stride: Column) -> Group:
    """`size` ranks that are `stride` apart."""
    return (Axis(size, stride),)


def group_size(group: Group) -> Column:
    """Ranks in the group."""
    return math.prod((axis.size for axis in group), start=1)


def split(group: Group, parts: Column) -> tuple[Group, Group]:
    """(one of `parts` equal parts of the group, the ranks with the same place in each part): the outermost axis divides, into
    single ranks where it has fewer than `parts`.
    """
    last = group[-1]
    parts = minimum(parts, last.size)
    size = last.size // parts
    return (*group[:-1], Axis(size, last.stride)), line(parts, last.stride * size)


def sharing(group: Group, *, block: int) -> Column:
    """Members of a group within one block of `block` consecutive ranks (an NVLink domain, the devices under a leaf).

    Where groups do not fit into blocks evenly, some straddle an edge, and everyone waits for them: counted are the ranks
    on the short side, gcd(block, extent) / stride of an axis.
    """
    counts = (_in_block(axis, block) for axis in group)
    return math.prod(counts, start=1)


def _group(sizes: dict[str, Column], names: tuple[str, ...], order: str) -> Group:
    axes: list[Axis] = []
    stride: Column = 1
    open_axis = False
    for name in order.split("-"):
        if name not in sizes:
            continue
        if name in names:
            if open_axis:
                axes[-1] = Axis(axes[-1].size * sizes[name], axes[-1].stride)
            else:
                axes.append(Axis(sizes[name], stride))
        open_axis = name in names
        stride = stride * sizes[name]
    return tuple(axes)


def _in_block(axis: Axis, block: int) -> Column:
    extent = axis.size * axis.stride
    edge = gcd(block, extent)
    return minimum(maximum(edge // axis.stride, 1), axis.size)


# What the network's topology does to traffic between nodes: leaf switches, oversubscription, rails.
#
# Ports hang on leaves: a fat tree's leaf holds every port of nodes_per_leaf nodes, a rail-optimised network's leaf one port
# (rail) of each of them. Above the leaves there is 1/network_oversubscription of the bandwidth below, shared evenly by
# whatever leaves at the same time. All groups of a kind communicate at once; so do all ranks that send.


def local_bandwidth(cluster: ClusterSpec) -> float:
    """Per-direction bandwidth to a neighbour in the domain: NVLink, or PCIe where there is none."""
    return cluster.gpu.nvlink_bandwidth_bytes_per_second or cluster.gpu.pcie_bandwidth_bytes_per_second


def ring_slowdown(group: Group, *, in_domain: Column, cluster: ClusterSpec) -> Column:
    """Share of its ports' bandwidth that a ring across leaves loses, as a factor of at least 1.

    A ring enters and leaves each leaf once, however many members it has there: with j domains of the group under a leaf,
    1/j of the leaf's ports send upwards, and 1/oversubscription of their bandwidth exists: max(1, oversubscription / j).
    """
    if not _oversubscribed(cluster):
        return 1.0
    in_leaf = maximum(sharing(group, block=_leaf_devices(cluster)), in_domain)
    return where(in_leaf < group_size(group), maximum(cluster.network_oversubscription * in_domain / in_leaf, 1.0), 1.0)


def send_slowdown(distance: Column, *, cluster: ClusterSpec) -> Column:
    """The same of every rank sending `distance` ranks on: a share distance / leaf of them, at most all, goes upwards."""
    if not _oversubscribed(cluster):
        return 1.0
    upwards = minimum(distance / _leaf_devices(cluster), 1.0)
    return maximum(cluster.network_oversubscription * upwards, 1.0)


def exchange_slowdown(group: Group, *, in_domain: Column, cluster: ClusterSpec) -> Column:
    """The same of an all-to-all: of what leaves the domain (size - k), the share (size - j k) leaves the leaf. Without NVLink
    nothing forwards to the right rail, and the (k - 1)/k that change rails climb as well.
    """
    if not _oversubscribed(cluster):
        return 1.0
    size, over = group_size(group), cluster.network_oversubscription
    in_leaf = maximum(sharing(group, block=_leaf_devices(cluster)), in_domain)
    upwards = (size - in_leaf) / maximum(size - in_domain, 1)
    if _changes_rails(cluster) and not cluster.gpu.nvlink_bandwidth_bytes_per_second:
        upwards = maximum(upwards, 1.0 - 1.0 / in_domain)
    return maximum(over * upwards, 1.0)


def forwarded_bytes(away_bytes: Column, *, in_domain: Column, cluster: ClusterSpec) -> Column:
    """Bytes of an all-to-all that cross NVLink before the network: on rails each message first goes to the neighbour on its
    receiver's rail (NCCL's PXN), one of the k in the domain; 1/k are there already.
    """
    if not _changes_rails(cluster) or not cluster.gpu.nvlink_bandwidth_bytes_per_second:
        return 0.0
    return away_bytes * (1.0 - 1.0 / in_domain)


def detour_latency(group: Group, cluster: ClusterSpec, inside: Link) -> Column:
    """Seconds more for a message between neighbours on different rails: one hop over NVLink to the right one."""
    if not _changes_rails(cluster):
        return 0.0
    off_rail = group[-1].stride % cluster.gpus_per_node != 0
    return where(off_rail, inside.latency_s, 0.0) if anywhere(off_rail) else 0.0


def _oversubscribed(cluster: ClusterSpec) -> bool:
    return cluster.nodes_per_leaf is not None and cluster.network_oversubscription > 1.0


def _changes_rails(cluster: ClusterSpec) -> bool:
    return cluster.network_topology == "rail_optimized"


def _leaf_devices(cluster: ClusterSpec) -> int:
    return (cluster.nodes_per_leaf or cluster.num_nodes) * cluster.gpus_per_node
