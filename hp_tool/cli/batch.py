"""`hp-tool batch QUERIES`: write one answer per line, in order. An invalid query affects only its
own line.
"""

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
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import typer

from hp_tool.cli import queries as query_files
from hp_tool.errors import InputError
from hp_tool.extras import require

if TYPE_CHECKING:
    from hp_tool.cli.batches.sources import Item

FLUSH_LINES = 64
"""Number of answers after which the output is flushed. If a batch is killed, at most this many
answers are lost.
"""
MAX_CODES = 5
"""Maximum number of rejection codes, and of error codes, in the summary, most frequent first."""


def batch(
    queries: Annotated[
        str,
        typer.Argument(
            metavar="QUERIES",
            help="JSON lines, a YAML stream or a CSV grid; - reads standard input.",
        ),
    ],
    output: Annotated[
        str, typer.Option(help="File for the answers; - writes standard output.")
    ] = "-",
    task: Annotated[
        Literal["estimate", "recommend"],
        typer.Option(help="Estimate one configuration per query, or rank its configurations."),
    ] = "estimate",
    top: Annotated[
        int, typer.Option(min=1, max=1000, help="recommend: maximum number of rows.")
    ] = 10,
    format: Annotated[
        Literal["jsonl", "yaml", "csv"] | None,
        typer.Option(help="Format of QUERIES. Default: by the file's suffix, else jsonl."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="QUERY", help="csv: the query to which every row adds its values."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Number of processes.")] = 1,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Keep the answers in --output and continue after the last one."
        ),
    ] = False,
    summary: Annotated[
        bool,
        typer.Option("--summary", help="Print the numbers of answers by result to standard error."),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(envvar="HP_SERVER", help="URL of a service that answers the queries."),
    ] = None,
    calibration: query_files.CalibrationOption = True,
) -> None:
    """Answer many queries. The exit code is 0 if the batch ran. A query that cannot be answered
    gets a line with status error.
    """
    from hp_tool.cli.batches import answering, sources

    kind = format or sources.SUFFIXES.get(Path(queries).suffix.lower(), "jsonl")
    if base is not None and kind != "csv":
        raise InputError(
            "--base is for CSV grids only; other formats contain complete queries",
            field="--base",
        )
    if server and jobs > 1:
        raise InputError(
            "--jobs starts processes on this machine and cannot be combined with --server; "
            "remove one of them",
            field="--jobs",
        )
    if server:
        require("client", by="--server")
    batch_task = answering.Task(name=task, top=top, calibration=calibration)
    counts = Summary(parse_answers=summary)
    with _open_queries(queries) as source, _open_output(output, resume=resume) as stream:
        items = sources.read_items(
            source, format=kind, base={} if base is None else query_files.read_mapping(base)
        )
        if resume:
            kept, last = truncate_incomplete_line(stream)
            _skip_answered(items, kept=kept, last=last, task=task)
            sys.stderr.write(f"kept {kept} answers from --output\n")
        if server:
            answers = answering.answer_by_server(items, batch_task, server=server)
        elif jobs > 1:
            answers = answering.answer_by_processes(items, batch_task, jobs=jobs)
        else:
            answers = answering.answer_here(items, batch_task)
        for number, answer in enumerate(_with_progress(answers, source), start=1):
            stream.write(answer.encode() + b"\n")
            counts.add(answer)
            if number % FLUSH_LINES == 0:
                stream.flush()
    sys.stderr.write(f"{counts.lines} answered, {counts.errors} of them with status error\n")
    if summary:
        counts.print()


def _with_progress(answers: Iterator[str], source: BinaryIO) -> Iterator[str]:
    if not sys.stderr.isatty():
        yield from answers
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    total = os.fstat(source.fileno()).st_size if source.seekable() else None
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[done]:,} answered"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        done = 0
        task = bar.add_task("", total=total, done=0)
        for number, answer in enumerate(answers, start=1):
            yield answer
            done = number
            if number % FLUSH_LINES == 0:
                bar.update(task, done=done, completed=None if total is None else source.tell())
        bar.update(task, done=done, completed=total)


@contextlib.contextmanager
def _open_queries(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield query_files.standard_input()
        return
    try:
        stream = Path(path).open("rb")  # noqa: SIM115 (errors of reading are not errors of opening)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", field="QUERIES") from None
    with stream:
        yield stream


@contextlib.contextmanager
def _open_output(path: str, *, resume: bool) -> Iterator[BinaryIO]:
    """Open the output; `-` is standard output. With `resume`, an existing file is not truncated."""
    if path == "-":
        if resume:
            raise InputError("--resume requires --output, the file to continue", field="--resume")
        if sys.stdout is None:
            raise InputError(
                "standard output is closed; name a file with --output", field="--output"
            )
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with Path(path).open("r+b" if resume and Path(path).exists() else "w+b") as stream:
            yield stream
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}", field="--output"
        ) from None


def truncate_incomplete_line(stream: BinaryIO) -> tuple[int, bytes]:
    """Remove an incomplete last line and seek to the end. Return the number of complete lines and
    the last complete line.

    Raises:
        InputError: A line is not an answer.
    """
    num_answers = end = 0
    last = b""
    stream.seek(0)
    for line in stream:
        if not line.endswith(b"\n"):
            break
        num_answers, end, last = num_answers + 1, end + len(line), line[:-1]
        if _mapping(last).get("status") not in ("ok", "error"):
            fix = f"keep the lines before it (head -n {num_answers - 1}), or write another file"
            raise InputError(
                f"--resume: line {num_answers:,} of the output is not an answer; {fix}",
                field="--output",
            )
    stream.seek(end)
    stream.truncate()
    return num_answers, last


def _skip_answered(items: Iterator[Item], *, kept: int, last: bytes, task: str) -> None:
    """Skip the queries whose answers are already stored.

    Raises:
        InputError: The file contains answers to other queries.
    """
    if not kept:
        return
    skipped = list(itertools.islice(items, kept - 1, kept))
    problem = None
    if not skipped:
        problem = f"it has {kept:,} answers, more than the number of queries"
    else:
        answer, query = (
            _mapping(last),
            _mapping(skipped[0] if isinstance(skipped[0], bytes) else b""),
        )
        query_id = query.get("id")
        other = "estimate" if task == "recommend" else "recommendations"
        if answer.get("id") != (query_id if isinstance(query_id, str) else None):
            problem = f"its line {kept:,} answers {answer.get('id')!r}, not {query_id!r}"
        elif other in answer:
            problem = f"its answers are not from --task {task}"
    if problem is not None:
        raise InputError(
            f"--resume: the output does not belong to these queries: {problem}", field="--output"
        )


def _mapping(line: bytes) -> dict[str, object]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


@dataclass(slots=True, kw_only=True)
class Summary:
    """Number of answered and failed queries, and the best answer."""

    parse_answers: bool
    """Whether to parse the answers, which `print` requires. False: only count lines and errors."""
    lines: int = 0
    errors: int = 0
    _feasible: int = 0
    _codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _best: tuple[float, int, str | None] | None = None

    def add(self, line: str) -> None:
        """Count one answer."""
        self.lines += 1
        error = (
            '"status":"error"' in line or '"status": "error"' in line
        )  # Quotes are escaped inside JSON strings.
        self.errors += error
        if self.parse_answers:
            self._count(json.loads(line))

    def _count(self, answer: dict[str, Any]) -> None:
        if answer["status"] == "error":
            self._codes["error", answer["error"]["code"]] += 1
            return
        if "recommendations" in answer:
            best = answer["recommendations"][:1]
            self._codes.update(
                () if best else [("infeasible", code) for code in answer["rejections"]]
            )
            estimate = (
                (best[0].get("calibrated_estimate") or best[0]["estimate"])
                if best
                else {"feasible": False}
            )
        else:
            estimate = answer.get("calibrated_estimate") or answer["estimate"]
            self._codes.update(("infeasible", reason["code"]) for reason in estimate["reasons"])
        if not estimate["feasible"]:
            return
        self._feasible += 1
        rate = (
            estimate.get("tokens_per_second_per_gpu")
            or estimate.get("output_tokens_per_second_per_gpu")
            or 0.0
        )
        if self._best is None or rate > self._best[0]:
            self._best = (rate, self.lines, answer["id"])

    def print(self) -> None:
        """Print the summary to standard error, because the answers may go to standard output."""
        from hp_tool.cli.layout import make_console, print_table

        infeasible = self.lines - self.errors - self._feasible
        rows = [("answered", self.lines), ("feasible", self._feasible)]
        rows += [
            ("infeasible", infeasible),
            *self._most_frequent_codes("infeasible"),
            ("errors", self.errors),
            *self._most_frequent_codes("error"),
        ]
        console = make_console(stderr=True)
        print_table(
            console, ("batch", "lines"), [(what, f"{count:,}") for what, count in rows], left=1
        )
        if self._best is not None:
            rate, number, name = self._best
            console.print(
                f"most tokens/s/GPU: {rate:,.0f}, line {number:,}" + (f" ({name})" if name else ""),
                markup=False,
            )

    def _most_frequent_codes(self, kind: str) -> list[tuple[str, int]]:
        codes = Counter(
            {code: count for (code_kind, code), count in self._codes.items() if code_kind == kind}
        )
        return [(f"  {code}", count) for code, count in codes.most_common(MAX_CODES)]
