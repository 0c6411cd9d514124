"""`hp-tool batch QUERIES`: one answer per line, in order; an invalid query affects only its own line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import typer

from hp_tool.cli import queries as query_files
from hp_tool.errors import InputError

FLUSH_LINES = 64
"""Answers are flushed after this many lines: a killed batch loses, and a reader of the output waits for, no more."""


def batch(
    queries: Annotated[
        str, typer.Argument(metavar="QUERIES", help="JSON lines, a YAML stream or a CSV grid; - reads standard input.")
    ],
    output: Annotated[str, typer.Option(help="File for the answers; - writes standard output.")] = "-",
    task: Annotated[Literal["estimate", "recommend"], typer.Option(help="What to do with each query.")] = "estimate",
    top: Annotated[int, typer.Option(min=1, max=1000, help="recommend: maximum number of rows.")] = 10,
    format: Annotated[
        Literal["jsonl", "yaml", "csv"] | None, typer.Option(help="Format of QUERIES; by default by its suffix, else jsonl.")
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="QUERY", help="csv: the query that every row changes.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Number of processes.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the answers in --output and continue behind them.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Print a summary on standard error.")] = False,
    server: Annotated[str | None, typer.Option(envvar="HP_SERVER", help="Have this server answer.")] = None,
    calibration: query_files.CalibrationOption = True,
) -> None:
    """Answer many queries. Exits 0 if it could run; queries that it could not answer have status error."""
    from hp_tool.cli.batches import answering, sources
    from hp_tool.cli.batches import output as answer_file

    kind = format or sources.SUFFIXES.get(Path(queries).suffix.lower(), "jsonl")
    if base is not None and kind != "csv":
        raise InputError("--base belongs to CSV grids: other formats have whole queries", field="--base")
    if server and jobs > 1:
        raise InputError("--jobs starts processes on this machine: leave it out with --server", field="--jobs")
    work = answering.Task(name=task, top=top, calibration=calibration)
    counts = answer_file.Summary(reading=summary)
    with _reading(queries) as source, answer_file.writing(output, resume=resume) as stream:
        items = sources.items(source, format=kind, base={} if base is None else query_files.read_mapping(base))
        if resume:
            kept, last = answer_file.keep_whole_lines(stream)
            answer_file.skip_answered(items, kept=kept, last=last, task=task)
            sys.stderr.write(f"{kept} answers kept\n")
        if server:
            answers = answering.by_server(items, work, server=server)
        elif jobs > 1:
            answers = answering.by_processes(items, work, jobs=jobs)
        else:
            answers = answering.here(items, work)
        for number, answer in enumerate(_shown(answers, source), start=1):
            stream.write(answer.encode() + b"\n")
            counts.add(answer)
            if number % FLUSH_LINES == 0:
                stream.flush()
    sys.stderr.write(f"{counts.lines} answered, {counts.errors} of them with status error\n")
    if summary:
        counts.print()


def _shown(answers: Iterator[str], source: BinaryIO) -> Iterator[str]:
    """The answers; if standard error is a terminal, it shows how far the queries have been read."""
    if not sys.stderr.isatty():
        yield from answers
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    total = os.fstat(source.fileno()).st_size if source.seekable() else None
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.fields[done]:,} answered"))
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
def _reading(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield query_files.standard_input()
        return
    try:
        stream = Path(path).open("rb")  # noqa: SIM115 (errors of reading are not errors of opening)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", field="QUERIES") from None
    with stream:
        yield stream
