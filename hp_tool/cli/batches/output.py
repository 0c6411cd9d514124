"""The output of a batch: its answers, also behind those of an interrupted batch, and a summary of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hp_tool.cli.batches.sources import Item
from hp_tool.errors import InputError

_CHUNK = 1 << 20
MAX_CODES = 5
"""Reasons and errors shown of each kind, the most frequent first."""


@contextlib.contextmanager
def writing(path: str, *, resume: bool) -> Iterator[BinaryIO]:
    """The stream for answers; `-` is standard output. With `resume` an existing file is kept."""
    if path == "-":
        if resume:
            raise InputError("--resume continues a file: name it with --output", field="--resume")
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
    """Remove an incomplete last line and go to the end; return the number of whole lines and the last of them."""
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
    """The line that ends at the position `end`."""
    tail, start = b"", max(end - 1, 0)
    while start > 0 and b"\n" not in tail:
        size = min(_CHUNK, start)
        start -= size
        stream.seek(start, os.SEEK_SET)
        tail = stream.read(size) + tail
    return tail[tail.rfind(b"\n") + 1 :]


def skip_answered(items: Iterator[Item], *, kept: int, last: bytes, task: str) -> None:
    """Skip the queries whose answers were kept. Raises InputError if the file has answers to other queries."""
    if not kept:
        return
    skipped = list(itertools.islice(items, kept - 1, kept))
    problem = None
    if not skipped:
        problem = f"it has {kept:,} answers, more than there are queries"
    else:
        answer, query = _mapping(last), _mapping(skipped[0] if isinstance(skipped[0], bytes) else b"")
        query_id = query.get("id")
        other = "estimate" if task == "recommend" else "recommendations"
        if answer.get("status") not in ("ok", "error"):
            problem = f"its line {kept:,} is no answer"
        elif answer.get("id") != (query_id if isinstance(query_id, str) else None):
            problem = f"its line {kept:,} answers {answer.get('id')!r}, not {query_id!r}"
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


@dataclass(slots=True, kw_only=True)
class Summary:
    """How many queries were answered, why some were not, and the best one; counted as the answers pass."""

    reading: bool
    """Parse the answers, as the printed summary needs, and not just count them."""
    lines: int = 0
    errors: int = 0
    _feasible: int = 0
    _codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _best: tuple[float, int, str | None] | None = None

    def add(self, line: str) -> None:
        """Count one answer."""
        self.lines += 1
        error = '"status":"error"' in line or '"status": "error"' in line  # inside a JSON string its quotes are escaped
        self.errors += error
        if self.reading:
            self._read(json.loads(line))

    def _read(self, answer: dict[str, Any]) -> None:
        if answer["status"] == "error":
            self._codes["error", answer["error"]["code"]] += 1
            return
        if "recommendations" in answer:
            best = answer["recommendations"][:1]
            self._codes.update(() if best else [("infeasible", code) for code in answer["rejections"]])
            estimate = (best[0].get("calibrated_estimate") or best[0]["estimate"]) if best else {"feasible": False}
        else:
            estimate = answer.get("calibrated_estimate") or answer["estimate"]
            self._codes.update(("infeasible", reason["code"]) for reason in estimate["reasons"])
        if not estimate["feasible"]:
            return
        self._feasible += 1
        rate = estimate.get("tokens_per_second_per_gpu") or estimate.get("output_tokens_per_second_per_gpu") or 0.0
        if self._best is None or rate > self._best[0]:
            self._best = (rate, self.lines, answer["id"])

    def print(self) -> None:
        """Print the table on standard error, because standard output may have the answers."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title="batch", show_header=False)
        table.add_column("what")
        table.add_column("lines", justify="right")
        table.add_row("answered", f"{self.lines:,}")
        table.add_row("feasible", f"{self._feasible:,}")
        table.add_row("infeasible", f"{self.lines - self.errors - self._feasible:,}")
        self._add_codes(table, "infeasible")
        table.add_row("errors", f"{self.errors:,}")
        self._add_codes(table, "error")
        console = Console(stderr=True)
        console.print(table)
        if self._best is not None:
            rate, number, name = self._best
            console.print(f"most tokens/s/GPU: {rate:,.0f}, line {number:,}" + (f" ({name})" if name else ""), markup=False)

    def _add_codes(self, table: Any, kind: str) -> None:
        codes = Counter({code: count for (of, code), count in self._codes.items() if of == kind})
        for code, count in codes.most_common(MAX_CODES):
            table.add_row(f"  {code}", f"{count:,}")
