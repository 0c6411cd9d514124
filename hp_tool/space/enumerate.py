"""All combinations of the axes as arrays, and which of them are legal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.cost.candidates import Candidates, IntArray
from hp_tool.cost.feasibility import legality, rejection_counts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.space.axes import Axes

MAX_COMBINATIONS = 50_000_000
"""Raw combinations one query may span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The legal candidates, and how many combinations each rule turned away."""

    candidates: Candidates
    rejections: dict[str, int]


def enumerate_space(*, axes: Axes, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload) -> Space:
    """Every legal combination once. Sizes that cannot divide the devices, or the layers, are dropped before the product
    is formed; they are counted like the rest. Combinations that mean the same thing (sequence parallelism without
    tensor parallelism, ZeRO without data parallelism) appear once.
    """
    counts: dict[str, int] = {}
    groups, dropped = _groups(axes, cluster)
    _add(counts, {"world_size_mismatch": dropped} if dropped else {})
    columns = _product(axes, groups, cluster)
    candidates = Candidates.from_columns(columns)
    codes = legality(model=model, cluster=cluster, workload=workload, candidates=candidates)
    _add(counts, rejection_counts(codes))
    return Space(candidates=candidates.take(np.flatnonzero(codes == 0)), rejections=counts)


def _groups(axes: Axes, cluster: ClusterSpec) -> tuple[IntArray, int]:
    """(t, p, c) triples that leave a whole data_parallel_size (the asked one, if any), shape (3, k), and how many do not."""
    grid = np.meshgrid(axes.tensor_parallel_size, axes.pipeline_parallel_size, axes.context_parallel_size, indexing="ij")
    triples = np.stack([axis.ravel() for axis in grid]).astype(np.int64)
    ranks = triples.prod(axis=0)
    d = axes.data_parallel_size
    matches = cluster.num_gpus % ranks == 0 if d is None else ranks * d == cluster.num_gpus
    return triples[:, matches], int(np.count_nonzero(~matches))


def _product(axes: Axes, groups: IntArray, cluster: ClusterSpec) -> dict[str, IntArray]:
    sequence_parallel = (2,) if axes.sequence_parallel is None else tuple(int(value) for value in axes.sequence_parallel)
    free = (
        np.arange(groups.shape[1]),
        axes.virtual_pipeline_parallel_size,
        axes.expert_parallel_size,
        axes.expert_tensor_parallel_size,
        axes.micro_batch_size,
        sequence_parallel,
        np.arange(len(axes.recompute)),
        axes.zero_stage,
    )
    size = int(np.prod([len(values) for values in free]))
    if size > MAX_COMBINATIONS:
        raise InputError(
            f"{size:,} combinations are more than {MAX_COMBINATIONS:,}; fix or narrow some axes",
            field="parallel",
            code="space_too_large",
        )
    group, v, ep, etp, b, sp, recompute, zero = (axis.ravel() for axis in np.meshgrid(*free, indexing="ij"))
    t, p, c = groups[:, group]
    d = cluster.num_gpus // np.maximum(t * p * c, 1)
    method, layers = (np.asarray(column, dtype=np.int64)[recompute] for column in zip(*axes.recompute, strict=True))
    # Sequence parallelism shards over the tensor group, ZeRO over the replicas: with one member both mean nothing.
    columns = {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "virtual_pipeline_parallel_size": v,
        "context_parallel_size": c,
        "expert_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "data_parallel_size": d,
        "micro_batch_size": b,
        "sequence_parallel": np.where(sp == 2, t > 1, sp) * (t > 1),
        "recompute_method": method,
        "recompute_num_layers": layers,
        "zero_stage": zero,
    }
    repeated = np.zeros(size, dtype=bool)
    if len(sequence_parallel) > 1:
        repeated |= (t == 1) & (sp != sequence_parallel[0])
    if len(axes.zero_stage) > 1:
        repeated |= (d * c == 1) & (zero != axes.zero_stage[-1])
    return {name: column[~repeated] for name, column in columns.items()}


def _add(counts: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
