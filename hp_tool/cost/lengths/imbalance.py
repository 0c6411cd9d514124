"""Costs of rows with unequal attention: replicas wait for the slowest replica, and pipelines for
the longest micro-batch.
"""

import dataclasses
import functools
from typing import cast

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, where
from hp_tool.cost.attention import core_seconds
from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import CORE_ATTN, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.lengths.sequences import SEED, Rows
from hp_tool.cost.recomputation import recomputed_layer_fraction
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.workload import TrainingWorkload

PART = "length_imbalance"
"""Name of the step-time part that `with_imbalance` adds."""
MAX_BATCH = 1 << 20
"""Maximum number of rows per step for which batches are sampled."""
_DRAWN_ROWS = 1 << 19
_MAX_DRAWS = 64


def with_imbalance(
    costs: TrainingCosts, *, rows: Rows, case: TrainingCase, candidates: Candidates
) -> TrainingCosts:
    """Return the costs including the expected extra seconds of the slowest replica.

    A row's attention is proportional to the sum of l^2 over its sequences; everything else depends
    only on its length, padding included. Rows arrive in random order. The model ignores that the
    longer attention of a slower rank may hide more context-parallel communication. A
    multi-token-prediction layer counts as a layer of its stage.
    """
    per_length = _seconds_per_attended_token(case=case, candidates=candidates)
    extra = _extra_lengths(rows, candidates=candidates, workload=case.workload)
    waiting = per_length * extra
    return dataclasses.replace(
        costs,
        parts=cast(dict[str, FloatArray], {**costs.parts, PART: waiting}),
        step_s=costs.step_s + waiting,
    )


@functools.lru_cache(maxsize=1 << 14)
def expected_extra(
    rows: Rows, *, batch: int, replicas: int, micro_batch: int, lockstep: int = 1, fill: float = 0.0
) -> float:
    """Return the expected maximum over replicas, minus (m + fill) x mean, in tokens of attended
    length.

    The value of a replica is the sum over its micro-batches plus `fill` times the longest one. The
    result is at least zero. `fill` is (p-1)/v: if each job takes equally long on each of p
    machines, the last one ends after the sum of all jobs plus p-1 times the longest (proportionate
    flow shop; Pinedo, Scheduling, section 6.1). `lockstep` replicas wait for each other at every
    micro-batch. The expectation is over batches sampled with a fixed seed, which is the same for
    every way to divide the batch.
    """
    drawn = _draw_batches(rows, batch)
    total, longest = _per_replica(rows, batch, replicas, micro_batch, lockstep)
    count = batch // (replicas * micro_batch)
    slowest = (total + fill * longest).max(axis=1).mean()
    return max(float(slowest - (count + fill) * drawn.mean()), 0.0)


@functools.lru_cache(maxsize=4)
def _draw_batches(rows: Rows, batch: int) -> FloatArray:
    """Return the attended lengths of the rows of independently sampled batches; shape (draws,
    batch).
    """
    draws = min(max(_DRAWN_ROWS // batch, 1), _MAX_DRAWS)
    index = np.random.default_rng(SEED).integers(len(rows.squares), size=(draws, batch))
    return np.asarray(np.sort(rows.squares)[index] / rows.row_tokens)


@functools.lru_cache(maxsize=8)
def _per_replica(
    rows: Rows, batch: int, replicas: int, micro_batch: int, lockstep: int
) -> tuple[FloatArray, FloatArray]:
    """Return (sum over micro-batches, longest micro-batch) of each lockstep group of replicas; each
    has shape (draws, groups).
    """
    each = _draw_batches(rows, batch).reshape(
        -1, replicas // lockstep, lockstep, batch // (replicas * micro_batch), micro_batch
    )
    work = each.mean(axis=4).max(axis=2)
    return work.sum(axis=2), work.max(axis=2)


def _extra_lengths(rows: Rows, *, candidates: Candidates, workload: TrainingWorkload) -> Floats:
    c = candidates
    d, b = c.data_parallel_size, c.micro_batch_size
    # If experts span several replicas, or gradients or weights are sharded, replicas wait for each
    # other at every micro-batch.
    experts = (
        c.expert_parallel_size
        * c.expert_tensor_parallel_size
        // (c.tensor_parallel_size * c.context_parallel_size)
    )
    lockstep = np.where(np.asarray(c.zero_stage) >= 2, d, np.clip(experts, 1, d))
    lockstep = np.where(d % lockstep == 0, lockstep, d)
    kinds = np.stack(
        np.broadcast_arrays(
            d, b, lockstep, c.pipeline_parallel_size, c.virtual_pipeline_parallel_size
        ),
        axis=-1,
    )
    distinct, inverse = np.unique(kinds.reshape(-1, 5), axis=0, return_inverse=True)
    extra = np.array(
        [
            expected_extra(
                rows,
                batch=workload.global_batch_size,
                replicas=replicas,
                micro_batch=micro_batch,
                lockstep=together,
                fill=(stages - 1) / chunks,
            )
            for replicas, micro_batch, together, stages, chunks in distinct.tolist()
        ]
    )
    return float(extra[0]) if c.is_alone else extra[inverse.reshape(kinds.shape[:-1])]


def _seconds_per_attended_token(*, case: TrainingCase, candidates: Candidates) -> Floats:
    """Return the seconds per additional token of attended length in a micro-batch on a stage.

    Includes forward, backward and recomputation.
    """
    model = case.model

    def core(attended: float) -> tuple[Floats, Floats]:
        return core_seconds(
            case=case, s=shapes(case=case, candidates=candidates, attended=attended)
        )

    # Fused attention is linear in the attended length, so the difference is exact.
    (none, none_backward), (one, one_backward) = core(0.0), core(1.0)
    forward, backward = one - none, one_backward - none_backward
    layers = (
        model.num_hidden_layers + model.num_nextn_predict_layers
    ) / candidates.pipeline_parallel_size
    full_fraction = recomputed_layer_fraction(
        candidates, layers_per_chunk=layers / candidates.virtual_pipeline_parallel_size
    )
    again = full_fraction + where(candidates.recompute_modules & CORE_ATTN, 1.0, 0.0)
    return layers * ((1.0 + again) * forward + backward)
