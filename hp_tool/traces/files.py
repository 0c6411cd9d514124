"""Trace files by their first bytes: gzip or not, JSON or SQLite; several ranks on one clock."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from hp_tool.errors import InputError
from hp_tool.traces.json_stream import TraceStream
from hp_tool.traces.kineto import read_kineto
from hp_tool.traces.timeline.events import RankEvents

MAX_BYTES = 4 * 2**30
"""Of one trace, unpacked."""
MAX_RATIO = 200
"""Unpacked bytes for each packed one, after the first RATIO_FROM: traces reach 20."""
RATIO_FROM = 64 * 2**20
MAX_FILES = 256
_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\x00"


class Unpacked(io.RawIOBase):
    """A file's bytes, unpacked where they are packed, up to MAX_BYTES. Raises InputError beyond,
    and for damaged files.
    """

    def __init__(self, stream: BinaryIO, *, name: str) -> None:
        first = stream.read(2)
        stream.seek(0)
        self._packed = stream
        self._stream: BinaryIO = (
            cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if first == _GZIP else stream
        )
        self._name, self._count = name, 0

    def read(self, size: int = -1, /) -> bytes:
        """Further bytes, no more than `size`."""
        try:
            content = self._stream.read(size)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(
                f"{self._name} is damaged: {error}", field="trace", code="syntax"
            ) from None
        self._count += len(content)
        packed = max(self._packed.tell(), 1)
        if self._count > MAX_BYTES:
            raise InputError(
                f"{self._name} is larger than {MAX_BYTES // 2**30} GiB; profile fewer steps",
                field="trace",
                code="too_large",
            )
        if (
            self._stream is not self._packed
            and self._count > RATIO_FROM
            and self._count > MAX_RATIO * packed
        ):
            raise InputError(
                f"{self._name} unpacks to {self._count // packed} times its size, and traces to "
                "20: it is no trace",
                field="trace",
                code="zip_bomb",
            )
        return content


def read_traces(
    paths: Sequence[Path], *, names: Sequence[str] | None = None
) -> tuple[RankEvents, ...]:
    """The ranks that files recorded, by rank, on the clock of the first. Raises InputError for what
    cannot be read.

    `names`: what errors call the files, and what may tell their ranks; None: their paths.
    """
    if not 1 <= len(paths) <= MAX_FILES:
        raise InputError(
            f"{len(paths)} traces; give 1 to {MAX_FILES}", field="trace", code="too_many"
        )
    ranks: dict[int, tuple[RankEvents, int]] = {}
    called = [str(path) for path in paths] if names is None else names
    for place, (path, name) in enumerate(zip(paths, called, strict=True)):
        for events, origin_ns in read_trace(path, name=name, rank=_rank_of(Path(name).name, place)):
            if events.rank in ranks:
                message = f"{name}: another file is of rank {events.rank} too; give each rank once"
                raise InputError(message, field="trace", code="repeated")
            ranks[events.rank] = events, origin_ns
    first_ns = next(iter(ranks.values()))[1]
    return tuple(
        _moved(events, 1e-9 * (origin_ns - first_ns))
        for _, (events, origin_ns) in sorted(ranks.items())
    )


def read_trace(path: Path, *, name: str, rank: int) -> list[tuple[RankEvents, int]]:
    """(events, the origin of their times on its host's clock, in nanoseconds) of each rank in one
    file.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_SQLITE))
            stream.seek(0)
            if start != _SQLITE:
                unpacked = cast(BinaryIO, Unpacked(stream, name=name))
                return [read_kineto(TraceStream(unpacked, name=name), name=name, rank=rank)]
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror or error}", field="trace"
        ) from None
    from hp_tool.traces.nsight import read_nsight

    return [(events, 0) for events in read_nsight(path, name=name, rank=rank)]


def _rank_of(name: str, place: int) -> int:
    """The rank that a file's name speaks of, else its place among the files."""
    match = re.search(r"rank[-_.]?(\d{1,6})", name, re.IGNORECASE)
    return place if match is None else int(match[1])


def _moved(events: RankEvents, seconds: float) -> RankEvents:
    """The rank with all times later by `seconds`."""
    if not seconds:
        return events
    phases = replace(
        events.phases, start_s=events.phases.start_s + seconds, end_s=events.phases.end_s + seconds
    )
    return replace(
        events,
        start_s=events.start_s + seconds,
        end_s=events.end_s + seconds,
        launch_s=events.launch_s + seconds,
        steps_s=events.steps_s + seconds,
        phases=phases,
        flops=events.flops + np.array([seconds, 0.0]),
    )
