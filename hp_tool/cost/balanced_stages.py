"""Balance pipeline stages whose layers have different costs. Stages contain complete layers and
respect the framework's limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.pipeline_parts import StageKind
from hp_tool.cost.step_time import micro_batches
from hp_tool.cost.training import training_costs
from hp_tool.domain.parts import PER_MICRO_BATCH

MAX_LAYERS = 512
"""Maximum number of layers. The search considers every pair of first and last layer, so its time
grows with the square of the number of layers.
"""


def balanced_chunks(
    seconds: FloatArray, *, stages: int, chunks: int, ends_alone: bool
) -> list[int] | None:
    """Return the number of layers in each of the p v model chunks that minimises the time of the
    slowest chunk.

    Ties are broken in favour of the most even chunk times. Returns None if no split is possible.
    `seconds` has shape (layers,), from `layer_seconds`. With `ends_alone`, all stages between the
    first and the last have the same number of layers.
    """
    if stages * chunks > len(seconds) or len(seconds) > MAX_LAYERS or (ends_alone and chunks > 1):
        return None
    return (
        _split_with_equal_middle(seconds, stages)
        if ends_alone
        else split_evenly(seconds, stages * chunks)
    )


def pipeline_seconds(
    seconds: FloatArray, sizes: Sequence[int], *, stages: int, micro_batches: float
) -> float:
    """Return the seconds to run all micro-batches through a pipeline of these chunks.

    The slowest stage runs every micro-batch. Each other stage adds the time of one micro-batch,
    divided by v.
    """
    ends = np.cumsum(sizes)
    of_chunks = np.array(
        [seconds[end - size : end].sum() for end, size in zip(ends, sizes, strict=True)]
    )
    of_stages = of_chunks.reshape(-1, stages).sum(axis=0)
    slowest = of_stages.max()
    return float(micro_batches * slowest + (of_stages.sum() - slowest) / (len(sizes) // stages))


def layer_seconds(case: TrainingCase, candidates: Candidates) -> FloatArray:
    """Return the time in seconds of each layer for one micro-batch, forward and backward; shape (n,
    layers).

    The first layer includes the embedding. The last layer includes multi-token prediction, output
    layer and loss. `candidates` has n rows. Waits for the host are excluded: while the host
    launches the kernels of short layers, the device is still running earlier, longer layers.
    """
    model, depths = case.model, case.model.num_nextn_predict_layers
    kinds = len(model.kinds)
    places = [
        *range(kinds),
        model.pattern[0],
        model.pattern[-1],
    ]  # One stage per kind, and the first and last stage.
    counts = np.eye(kinds)[places]
    counts[-1] += depths * np.array(model.mtp_kinds)
    embedding, output = np.eye(kinds + 2)[-2:]
    rows = candidates.take(np.repeat(np.arange(len(candidates)), len(places)))
    columns: list[Any] = [
        np.tile(column, len(candidates))
        for column in (embedding, output, depths * output, *counts.T)
    ]
    stage = StageKind(
        ranks=1.0,
        rank=0.0,
        extra_layers=columns[2],
        embedding=columns[0],
        embedding_copies=columns[0],
        output=columns[1],
        chunk_layers=1.0,
        kinds=tuple(columns[3:]),
    )
    costs = training_costs(case=case, candidates=rows, pipeline=stage.pipeline(model))
    m = micro_batches(rows, workload=case.workload)
    each = np.reshape(sum(costs.parts[name] for name in PER_MICRO_BATCH) / m, (-1, len(places)))
    seconds = each[:, list(model.pattern)]
    seconds[:, 0], seconds[:, -1] = each[:, -2], each[:, -1]
    return seconds


def split_evenly(seconds: FloatArray, parts: int) -> list[int]:
    """Return the number of consecutive items in each part, chosen so that the largest sum of a part
    is minimal. Each part has at least one item.

    Among equal results, the one with the smallest sum of squares is returned.
    """
    before = np.concatenate([[0.0], np.cumsum(seconds)])
    spans = before[None, :] - before[:, None]  # (from, to): seconds of the layers in between.
    spans[np.tril_indices(len(before))] = np.inf

    def shortest(costs: FloatArray, join: Any) -> tuple[float, list[Any]]:
        """Return the minimal cost of dividing all layers into `parts` parts. Also return the start
        of each part, indexed by its end.
        """
        so_far, begins = np.where(np.arange(len(before)) == 0, 0.0, np.inf), []
        for _ in range(parts):
            joined = join(so_far[:, None], costs)
            begins.append(joined.argmin(axis=0))
            so_far = joined.min(axis=0)
        return float(so_far[-1]), begins

    slowest, _ = shortest(spans, np.maximum)
    _, begins = shortest(np.where(spans <= slowest * (1.0 + 1e-9), spans**2, np.inf), np.add)
    ends = [len(seconds)]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return [end - begin for begin, end in itertools.pairwise(reversed(ends))]


def _split_with_equal_middle(seconds: FloatArray, stages: int) -> list[int] | None:
    layers, between, before = len(seconds), stages - 2, np.concatenate([[0.0], np.cumsum(seconds)])

    def slowest(sizes: Sequence[int]) -> tuple[float, float]:
        each = np.diff(before[list(itertools.accumulate(sizes, initial=0))])
        return float(each.max()), float((each**2).sum())

    splits = [
        [first, *[rest // between] * between, layers - first - rest]
        if between
        else [first, layers - first]
        for first in range(1, layers)
        for rest in (range(between, layers - first, between) if between else (0,))
    ]
    return min(splits, key=slowest, default=None)
