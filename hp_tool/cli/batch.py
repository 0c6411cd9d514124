"""`hp-tool batch QUERIES`: one answer a line, in order; a bad line harms only itself."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import typer

from hp_tool.cli import queries as query_files
from hp_tool.cli.calibrations import CalibrationOption
from hp_tool.errors import InputError

FLUSH_LINES = 64
"""What a killed batch may lose is answered again; what a reader of the output waits for is this many lines."""


def register(app: typer.Typer) -> None:
    """Add `batch` to the command line."""
    app.command()(batch)


def batch(
    queries: Annotated[
        str, typer.Argument(metavar="QUERIES", help="JSON lines, a YAML stream or a CSV grid; - reads standard input.")
    ],
    output: Annotated[str, typer.Option(help="File for the answers; - writes standard output.")] = "-",
    task: Annotated[Literal["estimate", "recommend"], typer.Option(help="What to ask for each query.")] = "estimate",
    top: Annotated[int, typer.Option(min=1, max=1000, help="recommend: rows at most.")] = 10,
    format: Annotated[
        Literal["jsonl", "yaml", "csv"] | None, typer.Option(help="What QUERIES holds; by its suffix, else jsonl.")
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="QUERY", help="csv: the query that every row is laid over.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes that answer.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --output has already and go on behind it.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="A table of the outcome on standard error.")] = False,
    server: Annotated[str | None, typer.Option(envvar="HP_SERVER", help="Let this server answer.")] = None,
    calibration: CalibrationOption = True,
) -> None:
    """Answer many queries. Exits 0 if it could run; lines it could not answer carry status error."""
    from hp_tool.cli.batches import answering, sink, sources
    from hp_tool.cli.batches.summary import Summary

    kind = format or sources.format_of(queries)
    if base is not None and kind != "csv":
        raise InputError("--base belongs to CSV grids: other formats hold whole queries", field="--base")
    if server and jobs > 1:
        raise InputError("--jobs are processes on this machine; the server has its own", field="--jobs")
    asked = answering.Asked(task=task, top=top, calibration=calibration)
    counted = Summary(reading=summary)
    with _reading(queries) as source, sink.writing(output, resume=resume) as stream:
        items = sources.items(source, format=kind, base=_base(base))
        if resume:
            kept, last = sink.keep_whole_lines(stream)
            sink.skip_answered(items, kept=kept, last=last, task=task)
            sys.stderr.write(f"{kept} answers kept\n")
        if server:
            answers = answering.by_server(items, asked, server=server)
        elif jobs > 1:
            answers = answering.by_processes(items, asked, jobs=jobs)
        else:
            answers = answering.here(items, asked)
        for number, answer in enumerate(_shown(answers, source), start=1):
            stream.write(answer.encode() + b"\n")
            counted.add(answer)
            if number % FLUSH_LINES == 0:
                stream.flush()
    sys.stderr.write(f"{counted.lines} answered, {counted.errors} of them with status error\n")
    if summary:
        counted.print()


def _base(path: str | None) -> dict[str, Any]:
    from hp_tool.queries import schema

    return {} if path is None else schema.parse_mapping(query_files.read_text(path))


def _shown(answers: Iterator[str], source: BinaryIO) -> Iterator[str]:
    """The answers, with a bar on standard error where that is a terminal: how far the queries have been read."""
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
        stream = Path(path).open("rb")  # noqa: SIM115 (an error of what reads it is not one of opening it)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", field="QUERIES") from None
    with stream:
        yield stream
