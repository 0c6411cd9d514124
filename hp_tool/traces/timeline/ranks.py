"""All recorded ranks side by side: clocks, who waits for whom, each rank's steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hp_tool.domain.parts import COMMUNICATION
from hp_tool.traces.timeline.events import FloatArray, IntArray, RankEvents
from hp_tool.traces.timeline.split import StepSplit, owners, split
from hp_tool.traces.timeline.windows import windows

UNHINDERED = 0.1
"""Quantile of durations of equal messages between stages that is their transfer alone: the others
waited for their sender.
"""
P2P = COMMUNICATION.index("pipeline_p2p")
Key = tuple[tuple[int, ...], int, int]
"""(ranks of the group, operation, group's part): what is called in one order on all members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Steps of the recorded ranks, side by side."""

    ranks: tuple[RankEvents, ...]
    """By rank."""
    windows_s: tuple[FloatArray, ...]
    """(steps, 2) by rank."""
    splits: tuple[tuple[StepSplit, ...], ...]
    """[rank][step]; as many steps of each."""
    waits_until_s: tuple[FloatArray, ...]
    """(n,) by rank: until when each event only waits for another rank; -inf: it does not."""
    marked: bool
    """Whether steps were marked or found; else everything is one step."""
    matched: int
    """Collectives that were seen on several ranks."""

    @property
    def critical(self) -> int:
        """Index of the rank that others wait for: the longest median step without waits."""
        own = [float(np.median([step.own_s for step in steps])) for steps in self.splits]
        return int(np.argmax(own))

    @property
    def typical(self) -> int:
        """Index of the step of median length on the critical rank."""
        lengths = [step.step_s for step in self.splits[self.critical]]
        return int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])


def timeline(ranks: Sequence[RankEvents]) -> Timeline:
    """Split the steps of all ranks. Ranks without a step are left out; no step at all gives an
    empty timeline.
    """
    cut = {each.rank: windows(each) for each in ranks}
    kept = tuple(
        sorted((each for each in ranks if len(cut[each.rank][0])), key=lambda each: each.rank)
    )
    count = min((len(cut[each.rank][0]) for each in kept), default=0)
    # The last ones: who starts to record late misses the first.
    spans = tuple(cut[each.rank][0][-count:] for each in kept)
    instances = {each.rank: _instances(each, spans[row]) for row, each in enumerate(kept)}
    matches = list(_matches(instances))
    offsets = _offsets([each.rank for each in kept], matches)
    until = tuple(_waits(each, matches=matches, offsets=offsets) for each in kept)
    splits = tuple(
        tuple(
            split(each, owner=owner, waits_until_s=until[row], window_s=(float(low), float(high)))
            for low, high in spans[row]
        )
        for row, each in enumerate(kept)
        for owner in (owners(each),)
    )
    return Timeline(
        ranks=kept,
        windows_s=spans,
        splits=splits,
        waits_until_s=until,
        marked=all(cut[each.rank][1] for each in kept),
        matched=len(matches),
    )


@dataclass(frozen=True, slots=True)
class _Match:
    """One collective on each of its recorded ranks."""

    ranks: tuple[int, ...]
    events: tuple[int, ...]
    """Index of its event on each."""
    start_s: FloatArray
    end_s: FloatArray


def _instances(
    events: RankEvents, spans: FloatArray
) -> dict[tuple[int, Key], list[tuple[int, float, float]]]:
    """(event, start, end) of each collective in order, by step and key; messages between stages are
    no collectives.
    """
    columns, instances = events.collectives, defaultdict(list)
    starts = events.start_s[columns.event]
    step = np.searchsorted(spans[:, 0], starts, side="right") - 1
    for row in np.argsort(starts, kind="stable").tolist():
        group = events.groups[columns.group[row]]
        if group.part == COMMUNICATION[P2P] or len(group.ranks) < 2 or step[row] < 0:
            continue
        event = int(columns.event[row])
        key = (group.ranks, int(columns.operation[row]), COMMUNICATION.index(group.part))
        instances[int(step[row]), key].append(
            (event, float(starts[row]), float(events.end_s[event]))
        )
    return instances


def _matches(
    instances: Mapping[int, Mapping[tuple[int, Key], list[tuple[int, float, float]]]],
) -> Iterator[_Match]:
    """Collectives that all recorded members of their group called equally often in a step, in
    order.
    """
    for place in dict.fromkeys(place for own in instances.values() for place in own):
        members = [rank for rank in place[1][0] if rank in instances]
        calls = [instances[rank].get(place, []) for rank in members]
        if len(members) < 2 or len({len(each) for each in calls}) > 1:
            continue
        for same in zip(*calls, strict=True):
            event, start, end = zip(*same, strict=True)
            yield _Match(tuple(members), event, np.array(start), np.array(end))


def _offsets(ranks: Sequence[int], matches: Iterable[_Match]) -> dict[int, float]:
    """Seconds that each rank's clock is ahead of the first's: a collective ends on all its ranks at
    once, in the median.

    Ranks that share no collective with others keep their own clock.
    """
    apart: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for match in matches:
        first = match.ranks[0]
        for rank, difference in zip(
            match.ranks[1:], (match.end_s[1:] - match.end_s[0]).tolist(), strict=True
        ):
            apart[first][rank].append(difference)
            apart[rank][first].append(-difference)
    offsets: dict[int, float] = {}
    for root in ranks:
        if root in offsets:
            continue
        offsets[root] = 0.0
        open_ranks = deque([root])
        while open_ranks:
            here = open_ranks.popleft()
            for other, differences in apart[here].items():
                if other not in offsets:
                    offsets[other] = offsets[here] + float(np.median(differences))
                    open_ranks.append(other)
    return offsets


def _waits(
    events: RankEvents, *, matches: Sequence[_Match], offsets: Mapping[int, float]
) -> FloatArray:
    """(n,) until when each event only waits: of a collective until its last rank came, of a message
    until it must have begun to arrive.
    """
    until = np.full(len(events.start_s), -np.inf)
    for match in matches:
        if events.rank in match.ranks:
            place = match.ranks.index(events.rank)
            arrived = match.start_s - [offsets[rank] for rank in match.ranks]
            latest = float(arrived.max()) + offsets[events.rank]
            until[match.events[place]] = latest if latest > match.start_s[place] else -np.inf
    columns = events.collectives
    between = np.array([group.part == COMMUNICATION[P2P] for group in events.groups], dtype=bool)
    messages = (
        np.flatnonzero(between[columns.group])
        if len(columns.group)
        else np.empty(0, dtype=np.int64)
    )
    rows = columns.event[messages]
    lengths = events.end_s[rows] - events.start_s[rows]
    for same in _alike(columns.size_bytes[messages]):
        until[rows[same]] = events.end_s[rows[same]] - np.quantile(lengths[same], UNHINDERED)
    return until


def _alike(sizes: FloatArray) -> Iterator[IntArray]:
    """Rows of equal sizes; unknown ones are one size."""
    known = np.nan_to_num(sizes, nan=-1.0)
    for size in np.unique(known):
        yield np.flatnonzero(known == size)
