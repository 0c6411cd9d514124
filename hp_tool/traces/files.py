"""Open trace files (gzip or plain, JSON or SQLite) and align their ranks to one clock."""

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
"""Maximum uncompressed size of a trace in bytes."""
MAX_COMPRESSION_RATIO = 200
"""Maximum compression ratio, checked once more than MIN_CHECKED_BYTES were read. Real traces reach
20.
"""
MIN_CHECKED_BYTES = 64 * 2**20
MAX_FILES = 256
_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\x00"


class Unpacked(io.RawIOBase):
    """Read a file, and decompress it if it is gzipped.

    Raises:
        InputError: The file is damaged, or larger than MAX_BYTES.
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
        """Read at most `size` bytes."""
        try:
            content = self._stream.read(size)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(
                f"{self._name} is damaged: {error}.", field="trace", code="syntax"
            ) from None
        self._count += len(content)
        packed = max(self._packed.tell(), 1)
        if self._count > MAX_BYTES:
            raise InputError(
                f"{self._name} is larger than {MAX_BYTES // 2**30} GiB. Profile fewer steps.",
                field="trace",
                code="too_large",
            )
        if (
            self._stream is not self._packed
            and self._count > MIN_CHECKED_BYTES
            and self._count > MAX_COMPRESSION_RATIO * packed
        ):
            raise InputError(
                f"{self._name} unpacks to {self._count // packed} times its size; a trace expands "
                "about 20 times. Check the file.",
                field="trace",
                code="zip_bomb",
            )
        return content


def read_traces(
    paths: Sequence[Path], *, names: Sequence[str] | None = None
) -> tuple[RankEvents, ...]:
    """Read trace files. Return their ranks in ascending order, on the clock of the first file.

    Args:
        paths: Trace files.
        names: File names for error messages and for detecting ranks; by default the paths.

    Raises:
        InputError: A file is not a readable trace, or a rank occurs twice.
    """
    if not 1 <= len(paths) <= MAX_FILES:
        raise InputError(
            f"Got {len(paths)} traces. Pass 1 to {MAX_FILES}.", field="trace", code="too_many"
        )
    ranks: dict[int, tuple[RankEvents, int]] = {}
    file_names = [str(path) for path in paths] if names is None else names
    for place, (path, name) in enumerate(zip(paths, file_names, strict=True)):
        for events, origin_ns in read_trace(
            path, name=name, rank=_rank_from_name(Path(name).name, place)
        ):
            if events.rank in ranks:
                message = (
                    f"{name}: rank {events.rank} is in another file, too. Pass each rank once."
                )
                raise InputError(message, field="trace", code="repeated")
            ranks[events.rank] = events, origin_ns
    first_ns = next(iter(ranks.values()))[1]
    return tuple(
        _shift_times(events, 1e-9 * (origin_ns - first_ns))
        for _, (events, origin_ns) in sorted(ranks.items())
    )


def read_trace(path: Path, *, name: str, rank: int) -> list[tuple[RankEvents, int]]:
    """Read one trace file.

    Returns:
        For each rank, its events and the host clock at their time zero, in nanoseconds.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_SQLITE))
            stream.seek(0)
            if start != _SQLITE:
                unpacked = cast(BinaryIO, Unpacked(stream, name=name))
                return [read_kineto(TraceStream(unpacked, name=name), name=name, rank=rank)]
    except OSError as error:
        raise InputError(f"Cannot read {name}: {error.strerror or error}.", field="trace") from None
    from hp_tool.traces.nsight import read_nsight

    return [(events, 0) for events in read_nsight(path, name=name, rank=rank)]


def _rank_from_name(name: str, place: int) -> int:
    """Return the rank in a file name. If the name has none, return the file's position."""
    match = re.search(r"rank[-_.]?(\d{1,6})", name, re.IGNORECASE)
    return place if match is None else int(match[1])


def _shift_times(events: RankEvents, seconds: float) -> RankEvents:
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
