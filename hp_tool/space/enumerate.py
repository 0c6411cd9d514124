"""Enumerate the legal combinations of the axes as arrays, in chunks.

The axes that determine legality are combined and filtered first. The remaining combinations and the
values of the other axes (recomputation, ZeRO stage) form a grid. Only one chunk is in memory at a
time, so the size of a space is not limited by memory.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hp_tool.cost.arrays import IntArray
from hp_tool.cost.candidates import RECOMPUTE_COLUMNS, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.legality import REASONS, legality, rejection_counts
from hp_tool.domain import bounds
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.space.axes import Axes, is_default_layout

MAX_COMBINATIONS = 100_000_000
"""Maximum number of combinations per query, before filtering."""
BLOCK = 1 << 15
"""Number of combinations filtered at once, small enough for the CPU cache."""
CHUNK = 32_768
"""Number of candidates per chunk: large enough for numpy, small enough for the CPU cache."""

AXES = tuple(f.name for f in fields(ParallelQuery) if f.name in Axes.__slots__)
"""Axes for which a query may list values."""

Columns = dict[str, IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A chunk of legal candidates, and the number of combinations that each rule rejected."""

    candidates: Candidates
    """Grid of shape (layouts, recomputations, ZeRO stages)."""
    rejections: Counter[str]


def legal_chunks(*, axes: Axes, case: TrainingCase, size: int = CHUNK) -> Iterator[Space]:
    """Yield every legal combination once, in chunks of about `size`. At least one chunk is yielded,
    which may be empty.

    Sizes that cannot divide the number of devices are dropped before the product is formed, but
    their combinations are counted as rejected. Equivalent combinations (sequence parallelism
    without tensor parallelism, ZeRO without replicas) appear once.
    """
    cluster = case.cluster
    groups, dropped = _groups(axes, cluster)
    choices = _choices(axes, groups)
    # ZeRO shards over the replicas. With one replica all stages are equivalent, and the last stage
    # represents them.
    grids = (
        _Grid(axes, stages=axes.zero_stage, size=size),
        _Grid(axes, stages=axes.zero_stage[-1:], size=size),
    )
    schedules = np.array(axes.schedules(), dtype=np.int64).T
    total = math.prod(len(values) for values in choices.values())
    bounds.announce_combinations(
        total * grids[0].each, axes=axes.lengths(*AXES), most=MAX_COMBINATIONS
    )
    counts = Counter({"world_size_mismatch": dropped} if dropped else {})
    for start in range(0, total, BLOCK):
        bounds.check_work(done=min(BLOCK, total - start) * grids[0].each)
        block = _block(
            choices, groups, schedules, cluster, np.arange(start, min(start + BLOCK, total))
        )
        codes = legality(case=case, candidates=block)
        if not axes.chunks_are_asked:
            codes = codes | ~is_default_layout(block, layers=case.model.num_hidden_layers) * (
                1 << REASONS.index("layers_not_divisible")
            )
        replicas = block.data_parallel_size * block.context_parallel_size > 1
        weights = np.where(replicas, grids[0].each, grids[1].each)
        counts.update(rejection_counts(codes, weights=weights))
        for grid, belongs in zip(grids, (replicas, ~replicas), strict=True):
            grid.add(block.take(np.flatnonzero((codes == 0) & belongs)))
            for candidates in grid.full():
                bounds.check_work()
                yield Space(candidates=candidates, rejections=counts)
                counts = Counter()
    for grid in grids:
        yield Space(candidates=grid.rest(), rejections=counts)
        counts = Counter()


def _groups(axes: Axes, cluster: ClusterSpec) -> tuple[IntArray, int]:
    """Return the (t, p, c) triples that divide the number of devices, shape (3, k), and the number
    of triples that do not.

    If the query sets data_parallel_size d, t p c d must equal the number of devices.
    """
    lengths = axes.lengths(
        "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"
    )
    bounds.announce_combinations(
        number := math.prod(lengths.values()), axes=lengths, most=MAX_COMBINATIONS
    )
    grid = np.meshgrid(
        axes.tensor_parallel_size,
        axes.pipeline_parallel_size,
        axes.context_parallel_size,
        indexing="ij",
    )
    triples = np.stack([axis.ravel() for axis in grid]).astype(np.int64)
    ranks = triples.prod(axis=0)
    d = axes.data_parallel_size
    bounds.check_work(done=number)
    matches = cluster.num_gpus % ranks == 0 if d is None else ranks * d == cluster.num_gpus
    return triples[:, matches], int(np.count_nonzero(~matches))


def _choices(axes: Axes, groups: IntArray) -> Columns:
    """Return the values of the axes that determine legality, outermost axis first.

    `group` is an index into the (t, p, c) triples, and `schedule` an index into `Axes.schedules`.
    """
    # 2 means "on if t > 1".
    sequence_parallel = (2,) if axes.sequence_parallel is None else axes.sequence_parallel
    choices: dict[str, Any] = {
        "group": np.arange(groups.shape[1]),
        "schedule": np.arange(len(axes.schedules())),
        "expert_parallel_size": axes.expert_parallel_size,
        "expert_tensor_parallel_size": axes.expert_tensor_parallel_size,
        "micro_batch_size": axes.micro_batch_size,
        "sequence_parallel": sequence_parallel,
        "data_parallel_shard_size": axes.data_parallel_shard_size,
        "moe_token_dispatcher_type": axes.moe_token_dispatcher_type,
    }
    return {name: np.asarray(values, dtype=np.int64) for name, values in choices.items()}


def _block(
    choices: Columns, groups: IntArray, schedules: IntArray, cluster: ClusterSpec, numbers: IntArray
) -> Candidates:
    """Return the combinations with the given indices, without equivalent duplicates. The last axis
    varies fastest.
    """
    places = np.unravel_index(numbers, [len(values) for values in choices.values()])
    columns: Columns = {
        name: values[place] for (name, values), place in zip(choices.items(), places, strict=True)
    }
    t, p, c = groups[:, columns.pop("group")]
    d = cluster.num_gpus // np.maximum(t * p * c, 1)
    schedule, v = schedules[:, columns.pop("schedule")]
    split, shards = columns["sequence_parallel"], columns["data_parallel_shard_size"]
    nothing = np.zeros(len(numbers), dtype=np.int64)
    block = Candidates(
        **columns
        | {
            "tensor_parallel_size": t,
            "pipeline_parallel_size": p,
            "virtual_pipeline_parallel_size": v,
            "pipeline_schedule": schedule,
            "context_parallel_size": c,
            "data_parallel_size": d,
            # A shard group of all replicas is the default group.
            "data_parallel_shard_size": shards * (shards != d),
            "sequence_parallel": np.where(split == 2, 1, split) * (t > 1),
            "recompute_method": nothing,
            "recompute_num_layers": nothing,
            "recompute_modules": nothing,
            "zero_stage": nothing,
        }
    )
    # Sequence parallelism shards over the tensor group: in a group of one, on and off are
    # equivalent.
    once = (t > 1) | (split == choices["sequence_parallel"][0])
    # Ranks that have all experts dispatch no tokens: one dispatcher represents all of them.
    if len(dispatchers := choices["moe_token_dispatcher_type"]) > 1:
        dispatched = block.expert_parallel_size * block.expert_tensor_parallel_size > 1
        once &= dispatched | (block.moe_token_dispatcher_type == dispatchers[0])
        block = replace(
            block, moe_token_dispatcher_type=block.moe_token_dispatcher_type * dispatched
        )
    if 0 in choices["data_parallel_shard_size"]:
        once &= shards != d
    return block if once.all() else block.take(np.flatnonzero(once))


class _Grid:
    """Collect legal combinations until they fill a chunk, then combine them with recomputations and
    ZeRO stages. These two axes do not affect legality.
    """

    def __init__(self, axes: Axes, *, stages: tuple[int, ...], size: int) -> None:
        self._recompute, self._stages = axes.recompute, stages
        self.each = len(axes.recompute) * len(stages)
        self._rows = max(size // self.each, 1)
        self._waiting: list[Candidates] = []

    def add(self, combinations: Candidates) -> None:
        """Append combinations, in order."""
        self._waiting.append(combinations)

    def full(self) -> Iterator[Candidates]:
        """Yield the full chunks."""
        while sum(map(len, self._waiting)) >= self._rows:
            ready = Candidates.concatenate(self._waiting)
            self._waiting = [ready.take(slice(self._rows, None))]
            yield spanned_values(
                ready.take(slice(self._rows)), recompute=self._recompute, stages=self._stages
            )

    def rest(self) -> Candidates:
        """Return the remaining combinations as a chunk, which may be empty."""
        nothing = Candidates.from_columns({f.name: () for f in fields(Candidates)})
        combinations = Candidates.concatenate([*self._waiting, nothing])
        return spanned_values(combinations, recompute=self._recompute, stages=self._stages)


def spanned_values(
    rows: Candidates,
    *,
    recompute: Sequence[tuple[int, int, int]],
    stages: Sequence[int] | None = None,
) -> Candidates:
    """Return the grid of rows, recomputation codes and ZeRO stages. Without `stages`, each row
    keeps its own stage.
    """
    columns: Columns = {f.name: getattr(rows, f.name).reshape(-1, 1, 1) for f in fields(Candidates)}
    codes = np.asarray(recompute, dtype=np.int64).reshape(-1, len(RECOMPUTE_COLUMNS)).T
    columns |= {
        name: values.reshape(1, -1, 1)
        for name, values in zip(RECOMPUTE_COLUMNS, codes, strict=True)
    }
    if stages is not None:
        columns["zero_stage"] = np.asarray(stages, dtype=np.int64).reshape(1, 1, -1)
    return Candidates(**columns)
