"""`hp-tool batch QUERIES.jsonl`: one answer a line, in order; a bad line harms only itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TextIO

import typer

from hp_tool.cli.corrections import CalibrationOption, stored_corrections
from hp_tool.errors import InputError

MAX_LINE_BYTES = 1_000_000


def register(app: typer.Typer) -> None:
    """Add `batch` to the command line."""
    app.command()(batch)


def batch(
    queries: Annotated[str, typer.Argument(metavar="QUERIES", help="JSON lines, one query each; - reads standard input.")],
    output: Annotated[str, typer.Option(help="File for the answers; - writes standard output.")] = "-",
    task: Annotated[Literal["estimate", "recommend"], typer.Option(help="What to ask for each line.")] = "estimate",
    top: Annotated[int, typer.Option(min=1, max=1000, help="recommend: rows at most.")] = 10,
    server: Annotated[str | None, typer.Option(envvar="HP_SERVER", help="Let this server answer.")] = None,
    calibration: CalibrationOption = True,
) -> None:
    """Answer many queries. Exits 0 if it could run; lines it could not answer carry status error."""
    with _reading(queries) as source, _writing(output) as sink:
        answers = (
            _remote(source, server=server, task=task, top=top, calibration=calibration)
            if server
            else _local(source, task=task, top=top, calibration=calibration)
        )
        done = failed = 0
        for answer in answers:
            sink.write(answer + "\n")
            done += 1
            failed += '"status":"error"' in answer or '"status": "error"' in answer
    sys.stderr.write(f"{done} answered, {failed} of them with status error\n")


def _local(source: BinaryIO, *, task: Literal["estimate", "recommend"], top: int, calibration: bool) -> Iterator[str]:
    from hp_tool import answers

    with stored_corrections(wanted=calibration) as corrections:
        for line in _lines(source):
            if len(line) > MAX_LINE_BYTES:
                error = InputError(f"the line is longer than {MAX_LINE_BYTES:,} bytes", code="too_large")
                yield answers.error_line(b"", error)
            else:
                yield answers.answer_line(line, task=task, top=top, corrections=corrections)


def _remote(
    source: BinaryIO, *, server: str, task: Literal["estimate", "recommend"], top: int, calibration: bool
) -> Iterator[str]:
    from service.client import Client

    with Client(server=server) as client:
        yield from client.batch(lines=_lines(source), task=task, top=top, calibration=calibration)


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """Lines without blank ones; one that is too long is cut just past the limit, the rest of it skipped."""
    while line := source.readline(MAX_LINE_BYTES + 1):
        whole = line
        while not whole.endswith(b"\n") and len(whole) > MAX_LINE_BYTES and (whole := source.readline(MAX_LINE_BYTES + 1)):
            pass
        if line.strip():
            yield line


@contextlib.contextmanager
def _reading(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(path).open("rb") as stream:
            yield stream
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", field="QUERIES") from None


@contextlib.contextmanager
def _writing(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdout
        return
    try:
        with Path(path).open("w", encoding="utf-8") as stream:
            yield stream
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", field="--output") from None
