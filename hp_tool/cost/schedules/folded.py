"""Folded pipelines: ZB-V's first rank holds the first and the last stage, DualPipe's rank r the stages r and p - 1 - r."""

from __future__ import annotations

from hp_tool.cost.candidates import DUALPIPE, ZBV, Candidates
from hp_tool.cost.elementwise import Column, anywhere, maximum, where
from hp_tool.cost.placement import Axis, Group, dense_group
from hp_tool.cost.schedules.costs import is_folded


def with_mirrored_stage(c: Candidates, group: Group, *, order: str) -> Group:
    """`group`, whose ranks hold the same parameters, and in DualPipe the ranks of the mirrored stage, which keep them too
    (arXiv 2412.19437 table 2): they reduce their gradients together, and ZeRO shards over both. The distance is the
    farthest pair's.
    """
    if not anywhere(c.pipeline_schedule == DUALPIPE):
        return group
    (stages,) = dense_group(c, "pp", order=order)
    pair = Axis(1 + (c.pipeline_schedule == DUALPIPE), stages.stride * maximum(c.pipeline_parallel_size - 1, 1))
    return pair, *group


def folded_ends(
    c: Candidates, *, plain: tuple[Column, Column], layers: tuple[Column, Column], ends: Column
) -> tuple[Column, Column]:
    """What the first and the last rank hold: `plain` in a pipeline that is not folded; else their share of `layers`, those of
    the pipeline's two ends, and of `ends`, embedding and output layer together.
    """
    if not anywhere(is_folded(c)):
        return plain
    first, last = layers
    both = first + last + ends
    is_v, is_dual = c.pipeline_schedule == ZBV, c.pipeline_schedule == DUALPIPE
    return where(is_v, first + ends, where(is_dual, both, plain[0])), where(is_v, last, where(is_dual, both, plain[1]))


def share_of_ends(c: Candidates) -> Column:
    """Share of the micro-batches for which the rank that sets the pace runs embedding and output layer: ZB-V's first rank
    all of them, DualPipe's first and last rank half each.
    """
    return where(c.pipeline_schedule == ZBV, 1.0, 0.5)
