"""Slow nodes, devices and links among equals: who takes longer than the others for the same work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hp_tool.domain.measurement import OperationTimes

MIN_SLOWDOWN = 1.1
"""Less is not worth a service call."""
_DEVIATIONS = 5.0
"""Robust standard deviations beyond which a peer is no chance: one in two million were times normal."""
_MAD_TO_SD = 1.4826
_LOCAL = ("matmul", "attention", "add", "activation", "norm", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """One member of the cluster that lags."""

    kind: Literal["node", "gpu", "link"]
    name: str
    slowdown: float
    """Its time over the median of its peers, median over operations."""
    operations: int


def find_outliers(times: Sequence[OperationTimes], *, hosts: Sequence[str]) -> tuple[Outlier, ...]:
    """Devices by local operations, links by collectives of few ranks; where every device of a node lags it is the node.

    hosts: of each rank. Three peers are the least that can outvote one.
    """
    devices = _slow(_by_rank(times, names=_LOCAL), labels=[f"{host} rank {rank}" for rank, host in enumerate(hosts)])
    found: list[Outlier] = []
    named: set[str] = set()
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        slow = [devices[rank] for rank in ranks if rank in devices]
        if len(slow) == len(ranks) and len(set(hosts)) > 1:
            found.append(_outlier("node", host, slow))
        else:
            found += [_outlier("gpu", name, [(name, factor, n)]) for name, factor, n in slow]
        named |= {name for name, _, _ in slow}
    return (*found, *_links(times, hosts=hosts))


def _links(times: Sequence[OperationTimes], *, hosts: Sequence[str]) -> Iterable[Outlier]:
    """Groups of one shape against each other: a group's collective is as fast as its slowest link."""
    for size, stride in dict.fromkeys((each.operation.group_size, each.operation.stride) for each in times):
        if size == 1 or len(hosts) // size < 3:
            continue
        groups = group_ranks(len(hosts), size=size, stride=stride)
        rows = [
            [max(each.seconds_per_rank[rank] for rank in group) for group in groups]
            for each in times
            if (each.operation.group_size, each.operation.stride) == (size, stride)
        ]
        labels = [" - ".join(f"{hosts[rank]} rank {rank}" for rank in group) for group in groups]
        for name, factor, count in _slow(np.array(rows), labels=labels).values():
            yield Outlier(kind="link", name=name, slowdown=factor, operations=count)


def group_ranks(world: int, *, size: int, stride: int) -> list[list[int]]:
    """The groups of `size` ranks `stride` apart that `world` ranks are dealt out into."""
    blocks = range(0, world, size * stride)
    return [list(range(first, first + size * stride, stride)) for block in blocks for first in range(block, block + stride)]


def _by_rank(times: Sequence[OperationTimes], *, names: Sequence[str]) -> NDArray[np.float64]:
    """(operations, ranks) seconds."""
    return np.array([each.seconds_per_rank for each in times if each.operation.name in names], dtype=float)


def _slow(seconds: NDArray[np.float64], *, labels: Sequence[str]) -> dict[int, tuple[str, float, int]]:
    """Columns whose median log ratio to their peers' median is far out, by median absolute deviation: (name, factor, rows)."""
    if seconds.size == 0 or seconds.shape[1] < 3:
        return {}
    ratios = np.median(np.log(seconds) - np.median(np.log(seconds), axis=1, keepdims=True), axis=0)
    middle = float(np.median(ratios))
    spread = _MAD_TO_SD * float(np.median(np.abs(ratios - middle)))
    limit = max(float(np.log(MIN_SLOWDOWN)), _DEVIATIONS * spread)
    far: list[int] = np.flatnonzero(ratios - middle > limit).tolist()
    return {i: (labels[i], float(np.exp(ratios[i] - middle)), len(seconds)) for i in far}


def _outlier(kind: Literal["node", "gpu", "link"], name: str, slow: Sequence[tuple[str, float, int]]) -> Outlier:
    return Outlier(kind=kind, name=name, slowdown=float(np.median([factor for _, factor, _ in slow])), operations=slow[0][2])
