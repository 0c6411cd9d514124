"""Where the answers of a batch go; a file that an interrupted batch left is gone on with."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hp_tool.cli.batches.sources import Item
from hp_tool.errors import InputError

_CHUNK = 1 << 20


@contextlib.contextmanager
def writing(path: str, *, resume: bool) -> Iterator[BinaryIO]:
    """The stream for answers; `-` is standard output. With `resume` a file keeps its whole lines and is written on."""
    if path == "-":
        if resume:
            raise InputError("--resume goes on with a file: name it with --output", field="--resume")
        if sys.stdout is None:
            raise InputError("standard output is closed; name a file with --output", field="--output")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with Path(path).open("r+b" if resume and Path(path).exists() else "w+b") as stream:
            yield stream
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}", field="--output") from None


def keep_whole_lines(stream: BinaryIO) -> tuple[int, bytes]:
    """Cut a half-written last line off and go to the end: the number of whole lines kept, and the last of them."""
    kept = end = 0
    position = stream.seek(0)
    while chunk := stream.read(_CHUNK):
        kept += chunk.count(b"\n")
        if (last := chunk.rfind(b"\n")) >= 0:
            end = position + last + 1
        position += len(chunk)
    line = _line_before(stream, end)
    stream.seek(end)
    stream.truncate()
    return kept, line


def _line_before(stream: BinaryIO, end: int) -> bytes:
    """The line that ends at this position."""
    tail, start = b"", max(end - 1, 0)
    while start > 0 and b"\n" not in tail:
        size = min(_CHUNK, start)
        start -= size
        stream.seek(start, os.SEEK_SET)
        tail = stream.read(size) + tail
    return tail[tail.rfind(b"\n") + 1 :]


def skip_answered(items: Iterator[Item], *, kept: int, last: bytes, task: str) -> None:
    """Pass over the queries whose answers were kept. Raises InputError where the file holds answers to something else."""
    skipped = list(itertools.islice(items, kept - 1, kept)) if kept else []
    if not kept:
        return
    problem = None
    if not skipped:
        problem = f"it holds {kept:,} answers, more than there are queries"
    else:
        answer, query = _mapping(last), _mapping(skipped[0] if isinstance(skipped[0], bytes) else b"")
        asked = query.get("id")
        other = "estimate" if task == "recommend" else "recommendations"
        if answer.get("status") not in ("ok", "error"):
            problem = f"its line {kept:,} is no answer"
        elif answer.get("id") != (asked if isinstance(asked, str) else None):
            problem = f"its line {kept:,} answers {answer.get('id')!r}, not {asked!r}"
        elif other in answer:
            problem = f"its answers are not those of --task {task}"
    if problem is not None:
        raise InputError(f"--resume: the output does not belong to these queries: {problem}", field="--output")


def _mapping(line: bytes) -> dict[str, object]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
