"""Align recorded ranks: clock offsets, waits for other ranks, and steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hp_tool.domain.parts import COMMUNICATION
from hp_tool.traces.timeline.events import FloatArray, IntArray, RankEvents
from hp_tool.traces.timeline.split import StepSplit, owners, split
from hp_tool.traces.timeline.windows import windows

TRANSFER_QUANTILE = 0.1
"""Quantile of the durations of equal messages between stages that counts as the transfer time.
Longer ones include waiting for the sender.
"""
P2P = COMMUNICATION.index("pipeline_p2p")
Key = tuple[tuple[int, ...], int, int]
"""(ranks of the group, operation, part of the group). The members call collectives with the same
key in the same order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Steps of all recorded ranks on one clock."""

    ranks: tuple[RankEvents, ...]
    """Recorded ranks, in ascending order."""
    windows_s: tuple[FloatArray, ...]
    """Start and end of each step by rank, shape (steps, 2)."""
    splits: tuple[tuple[StepSplit, ...], ...]
    """Splits by [rank][step]. All ranks have the same number of steps."""
    waits_until_s: tuple[FloatArray, ...]
    """By rank, the time until which each event waits for other ranks, shape (n,); -inf if it does
    not wait.
    """
    marked: bool
    """True if steps were marked or found. Otherwise, the recording counts as one step."""
    matched: int
    """Number of collectives matched between ranks."""

    @property
    def critical(self) -> int:
        """Index of the rank that others wait for: the longest median step without waits."""
        medians = [float(np.median([step.own_s for step in steps])) for steps in self.splits]
        return int(np.argmax(medians))

    @property
    def typical(self) -> int:
        """Index of the critical rank's step with the median length."""
        lengths = [step.step_s for step in self.splits[self.critical]]
        return int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])


def timeline(ranks: Sequence[RankEvents]) -> Timeline:
    """Split the steps of all ranks. Ranks without steps are omitted, even if none remain."""
    steps_of = {events.rank: windows(events) for events in ranks}
    with_steps = tuple(
        sorted(
            (events for events in ranks if len(steps_of[events.rank][0])),
            key=lambda events: events.rank,
        )
    )
    count = min((len(steps_of[events.rank][0]) for events in with_steps), default=0)
    # Ranks that start recording late lack the first steps.
    spans = tuple(steps_of[events.rank][0][-count:] for events in with_steps)
    instances = {
        events.rank: _instances(events, spans[row]) for row, events in enumerate(with_steps)
    }
    matches = list(_matches(instances))
    offsets = _offsets([events.rank for events in with_steps], matches)
    until = tuple(_waits(events, matches=matches, offsets=offsets) for events in with_steps)
    splits = tuple(
        tuple(
            split(events, owner=owner, waits_until_s=until[row], window_s=(float(low), float(high)))
            for low, high in spans[row]
        )
        for row, events in enumerate(with_steps)
        for owner in (owners(events),)
    )
    return Timeline(
        ranks=with_steps,
        windows_s=spans,
        splits=splits,
        waits_until_s=until,
        marked=all(steps_of[events.rank][1] for events in with_steps),
        matched=len(matches),
    )


@dataclass(frozen=True, slots=True)
class _Match:
    """A collective that was matched on the recorded ranks of its group."""

    ranks: tuple[int, ...]
    events: tuple[int, ...]
    """Index of the event on each rank."""
    start_s: FloatArray
    end_s: FloatArray


def _instances(
    events: RankEvents, spans: FloatArray
) -> dict[tuple[int, Key], list[tuple[int, float, float]]]:
    """Return the event, start and end of each collective, in order, by step and key.

    Point-to-point messages between stages are excluded.
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
    """Yield collectives that all recorded group members called equally often in a step."""
    for place in dict.fromkeys(place for by_key in instances.values() for place in by_key):
        members = [rank for rank in place[1][0] if rank in instances]
        calls = [instances[rank].get(place, []) for rank in members]
        if len(members) < 2 or len({len(found) for found in calls}) > 1:
            continue
        for same in zip(*calls, strict=True):
            event, start, end = zip(*same, strict=True)
            yield _Match(tuple(members), event, np.array(start), np.array(end))


def _offsets(ranks: Sequence[int], matches: Iterable[_Match]) -> dict[int, float]:
    """Return the clock offset of each rank relative to the first rank, in seconds.

    A collective ends on all its ranks at the same time, so the offset is the median over
    collectives. Ranks that share no collective with others have offset 0.
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
    """Return the time until which each event waits, shape (n,); -inf if it does not wait.

    A collective waits until its last rank arrives. A message waits until its transfer can have
    started.
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
    for same in _rows_by_size(columns.size_bytes[messages]):
        until[rows[same]] = events.end_s[rows[same]] - np.quantile(lengths[same], TRANSFER_QUANTILE)
    return until


def _rows_by_size(sizes: FloatArray) -> Iterator[IntArray]:
    """Yield the rows of each message size. Unknown sizes count as equal."""
    filled = np.nan_to_num(sizes, nan=-1.0)
    for size in np.unique(filled):
        yield np.flatnonzero(filled == size)
