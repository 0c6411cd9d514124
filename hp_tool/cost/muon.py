"""Muon's update: the momentum of every weight matrix is orthogonalised by Newton-Schulz iterations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.communication import group_ring
from hp_tool.cost.compute import matmul_seconds
from hp_tool.cost.elementwise import Column, anywhere, maximum, minimum, where
from hp_tool.cost.linears import Linear, layer_linears
from hp_tool.cost.sharding import Sharding
from hp_tool.cost.stages import stage_layers
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec

ITERATIONS = 5
"""Newton-Schulz steps (arXiv 2502.16982 section 2.1; Megatron's muon_num_ns_steps)."""


def newton_schulz_flops(rows: Column, columns: Column) -> Column:
    """One matrix: with r the smaller and q the larger side an iteration is A = X X^T, A^2 and (b A + c A^2) X:
    2 r^2 q + 2 r^3 + 2 r^2 q FLOPs.
    """
    r, q = minimum(rows, columns), maximum(rows, columns)
    return ITERATIONS * (4.0 * r * r * q + 2.0 * r * r * r)


def newton_schulz_seconds(rows: Column, columns: Column, *, cluster: ClusterSpec, profile: EfficiencyProfile) -> Column:
    """One matrix alone, its three matmuls an iteration on the tensor cores at bf16's rate where there is one (Megatron's
    muon_fp32_matmul_prec medium); elementwise sums of r^2 and r q are small beside them and not counted.
    """
    r, q = minimum(rows, columns), maximum(rows, columns)
    precision = next(name for name in ("bf16", "fp16", "fp32") if name in cluster.gpu.peak_flops_per_second)
    machine: dict[str, Any] = {"gpu": cluster.gpu, "profile": profile, "precision": precision}
    return ITERATIONS * (
        matmul_seconds(r, r, q, **machine) + matmul_seconds(r, r, r, **machine) + matmul_seconds(r, q, r, **machine)
    )


def muon_seconds(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    profile: EfficiencyProfile,
    candidates: Candidates,
    division: Sharding,
    expert_division: Sharding,
    matrices: tuple[Column, Column],
) -> Column:
    """What Muon adds to the optimizer step: the orthogonalisation, and where ZeRO 2 and 3 leave every rank a shard of every
    matrix, two exchanges that bring 16-bit momenta together and updates back (arXiv 2502.16982 algorithm 1; experts' are
    not counted, whose groups are small). With ZeRO 0 every rank turns all matrices.
    """
    zero = candidates.zero_stage
    shards, expert_shards = (where(zero >= 1, one.shards, 1.0) for one in (division, expert_division))
    seconds = orthogonalize_seconds(
        model=model, cluster=cluster, profile=profile, candidates=candidates, shards=shards, expert_shards=expert_shards
    )
    if not anywhere(zero >= 2):
        return seconds
    wire = 2.0 * 2.0 * maximum(*matrices) / division.shards * (1.0 - 1.0 / division.shards)
    group = group_ring(group=division.shard_group, cluster=cluster, profile=profile)
    return seconds + where(zero >= 2, group.seconds(wire), 0.0)


def orthogonalize_seconds(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    profile: EfficiencyProfile,
    candidates: Candidates,
    shards: Column,
    expert_shards: Column,
) -> Column:
    """Seconds of the matrices that one rank of the largest stage turns. Tensor-parallel ranks turn their own slices (Megatron's
    muon_tp_mode blockwise), queries, keys and values apart (muon_split_qkv); whole matrices are dealt out to the `shards`
    ranks that divide the states (LayerWiseDistributedOptimizer), so that a rank has at least one.
    """
    stages = stage_layers(model, candidates, framework="megatron-core")
    layers = maximum(maximum(stages.first.layers, stages.last.layers), stages.pace)
    machine: dict[str, Any] = {"cluster": cluster, "profile": profile}
    dense = list(layer_linears(model, candidates))
    if not model.num_experts:
        return _dealt(dense, layers, shards, **machine)
    sparse, fraction = list(layer_linears(model, candidates, moe=True)), stages.pace_moe_fraction
    beside = _dealt([linear for linear in sparse if not linear.routed], layers * fraction, shards, **machine)
    experts = _dealt([linear for linear in sparse if linear.routed], layers * fraction, expert_shards, **machine)
    return _dealt(dense, layers * (1.0 - fraction), shards, **machine) * (fraction < 1.0) + beside + experts


def _dealt(linears: Iterable[Linear], layers: Column, shards: Column, **machine: Any) -> Column:
    """Seconds of the rank with the most to do when the matrices of `layers` layers are dealt out to `shards` ranks."""
    work: Column = 0.0
    longest: Column = 0.0
    for linear in linears:
        parts = linear.outputs if linear.module == "linear_qkv" else (sum(linear.outputs),)
        for rows in parts:
            seconds = newton_schulz_seconds(rows, linear.inputs, **machine)
            work = work + linear.count * seconds
            longest = maximum(longest, seconds)
    return maximum(layers * work / shards, longest)
