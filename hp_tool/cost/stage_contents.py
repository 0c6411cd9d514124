"""Number of layers of each kind on the stages of a pipeline, following
`domain.pipeline_layout`.

Each combination of stages, chunks and schedule is laid out once, so the time per candidate does not
depend on the number of layers.
"""

import functools
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hp_tool.cost.arrays import Floats
from hp_tool.cost.candidates import DUALPIPE, DUALPIPE_V, ZB_H1, ZBV, Candidates, unique_rows
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.pipeline_layout import PipelineLayout, chunk_layers

Counts = tuple[int, ...]
"""Number of layers of each kind, in the order of `ModelSpec.kinds`."""
Kinds = tuple[Floats, ...]
"""Number of layers of each kind for each candidate; shape (n,), or plain numbers common to all
candidates.
"""
STAGE_AXES = (
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "pipeline_schedule",
)
"""Candidate fields that determine the contents of the stages."""


class Between(NamedTuple):
    """A stage between the first and the last stage of each candidate's pipeline. If there is none,
    the first stage.
    """

    rank: Floats
    layers: Kinds
    mirrored: Kinds
    """Layers of stage p - 1 - rank, which the rank stores too under DualPipe; 0 under other
    schedules.
    """
    ranks: Floats
    """Number of stages with these contents. 0 if this entry repeats another one or if there is no
    such stage.
    """


class Contents(NamedTuple):
    """Stages of each candidate's pipeline, without multi-token-prediction layers."""

    first: Kinds
    last: Kinds
    fullest: Kinds
    """The last of the stages with the maximum number of layers."""
    between: tuple[Between, ...]
    """One entry for each distinct content of the stages between the first and the last, with the
    rank of the first such stage.

    Under ZB-H1, there is also an entry for the last of these stages, which has the most delayed
    weight gradients.
    """


def pipeline_contents(model: ModelSpec, c: Candidates, *, late: bool) -> Contents:
    """Return the contents of the stages. `late` is passed to `chunk_layers`."""
    kinds = len(model.kinds)
    unique, inverse = unique_rows(c, STAGE_AXES)
    columns = np.broadcast_arrays(*(getattr(unique, name) for name in STAGE_AXES))
    pipelines = [
        _pipeline(model.pattern, kinds, p, v, schedule, late, model.begins_dense)
        for p, v, schedule in zip(*(np.ravel(column).tolist() for column in columns), strict=True)
    ]
    rows = np.zeros(np.shape(c.pipeline_parallel_size), np.intp) if inverse is None else inverse
    most_stages = max(map(len, pipelines), default=3)
    padded = [each + ((*each[-1][:-1], 0),) * (most_stages - len(each)) for each in pipelines]

    def column(stage: int, place: int) -> Floats:
        values = [float(pipeline[stage][place]) for pipeline in padded]
        if len(set(values)) == 1:
            return values[0]
        return np.array(values, dtype=np.float64)[rows]

    def layers(stage: int, place: int = 1) -> Kinds:
        return tuple(column(stage, place + kind) for kind in range(kinds))

    return Contents(
        first=layers(0),
        last=layers(1),
        fullest=layers(2),
        between=tuple(
            Between(column(stage, 0), layers(stage), layers(stage, 1 + kinds), column(stage, -1))
            for stage in range(3, most_stages)
        ),
    )


@functools.lru_cache(maxsize=1 << 14)
def _pipeline(
    pattern: Counts,
    kinds: int,
    p: int,
    v: int,
    schedule: int,
    late: bool,
    begins_dense: bool,
) -> tuple[Counts, ...]:
    """Return (rank, layers of each kind, layers of the mirrored stage, number of identical stages)
    for the first stage, the last, the fullest, and those in `Contents.between`.
    """
    stages = stage_contents(
        pattern, kinds, p, v, schedule=schedule, late=late, begins_dense=begins_dense
    )
    nothing = (0,) * kinds

    def held(rank: int) -> Counts:
        return (*stages[rank], *(stages[p - 1 - rank] if schedule == DUALPIPE else nothing))

    between = [held(rank) for rank in range(1, p - 1)]
    fullest = max(range(p), key=lambda rank: (sum(stages[rank]), rank))
    rows = [(rank, *held(rank), 1) for rank in (0, p - 1, fullest)]
    rows += [(1 + between.index(each), *each, number) for each, number in Counter(between).items()]
    if schedule == ZB_H1 and between and rows[-1][0] != p - 2:
        rows.append((p - 2, *between[-1], 0))
    return tuple(rows)


@functools.lru_cache(maxsize=4096)
def stage_contents(
    pattern: tuple[int, ...],
    kinds: int,
    stages: int,
    chunks: int,
    *,
    schedule: int = 0,
    late: bool = False,
    begins_dense: bool = False,
) -> tuple[Counts, ...]:
    """Return the number of layers of each kind on each stage.

    `pattern` lists the kind of each layer in order. Chunk i is on stage i mod p. In a V schedule,
    stage r has the chunks r and 2p - 1 - r.
    """
    sizes = chunk_layers(
        num_layers=len(pattern), stages=stages, chunks=chunks, late=late, begins_dense=begins_dense
    )
    folded = schedule in (ZBV, DUALPIPE_V) and chunks == 2
    starts = list(accumulate([0, *sizes]))
    counts: list[list[int]] = [[0] * kinds for _ in range(stages)]
    for chunk, size in enumerate(sizes):
        stage = 2 * stages - 1 - chunk if folded and chunk >= stages else chunk % stages
        for kind in pattern[starts[chunk] : starts[chunk] + size]:
            counts[stage][kind] += 1
    return tuple(map(tuple, counts))


def blocks_by_stage(
    model: ModelSpec, config: ParallelConfig, layout: PipelineLayout | None
) -> list[str]:
    """Describe the layers of each pipeline stage, such as `12 x mamba2, 11 x experts, 3 x
    attention`.

    `layout` is the pipeline layout, if there is one.
    """
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    names = [describe_kind(kind) for _, kind in model.kinds]
    if layout is None:
        each = stage_contents(model.pattern, len(names), p, v, begins_dense=model.begins_dense)
    else:
        chunks = [layout.stage(rank, stages=p) for rank in range(p)]
        layers = [
            [kind for c in stage for kind in model.pattern[c.layers_before :][: c.layers]]
            for stage in chunks
        ]
        each = tuple(tuple(map(kinds.count, range(len(names)))) for kinds in layers)
    return [
        ", ".join(f"{count} x {name}" for count, name in zip(stage, names, strict=True) if count)
        for stage in each
    ]


def describe_kind(kind: ModelSpec) -> str:
    """Return the name of a kind of layer, such as `windowed attention and experts`."""
    mixer = (
        "windowed attention" if kind.mixer == "attention" and kind.sliding_window else kind.mixer
    )
    return (
        " and ".join(word for word in (mixer, kind.feed_forward or "dense") if word != "none")
        or "nothing"
    )
