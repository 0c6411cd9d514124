"""`hp-tool watch`: compare the steps of a running job with its earlier steps and with the
prediction. The exit code is 4 if the job is slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from os import SEEK_END
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.cli import queries

if TYPE_CHECKING:
    from pathlib import Path

    from hp_tool.domain.query import Query
    from hp_tool.domain.watch import Verdict

EXIT_SLOWER = 4
POLL_S = 0.5


def watch(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG...",
            help="Logs, or folders with one log per rank; - is standard input.",
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            "--query",
            metavar="FILE",
            help="Query of the job; adds the predicted step time and the cost of a slowdown.",
        ),
    ] = None,
    reader: Annotated[
        str | None, typer.Option("--format", help="Log format. Default: detected.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep reading as the logs grow, until interrupted.")
    ] = False,
    lost_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Instead of watching, print the best layout without this many of the "
            "query's nodes, "
            "and whether to wait for them.",
        ),
    ] = None,
    settings: queries.Setting = None,
    calibration: queries.CalibrationOption = True,
    as_json: queries.JsonOption = False,
) -> None:
    """Report when a running job becomes slower or is slower than predicted; print nothing
    otherwise.
    """
    from hp_tool.cluster.logs import READERS
    from hp_tool.domain.units import format_count
    from hp_tool.errors import InputError
    from hp_tool.questions.training.problem import resolve_training
    from hp_tool.watch import expected_pace
    from hp_tool.watch.logs import LogSteps, Watched, find_log_files

    if reader is not None and reader not in READERS:
        raise InputError(
            f"unknown format {reader!r}; known: {', '.join(READERS)}", field="--format"
        )
    parsed = None if query is None else queries.read_query(query, {}, settings)
    if lost_nodes is not None:
        return _print_after_loss(parsed, lost_nodes, calibration=calibration, as_json=as_json)
    if not logs:
        raise InputError(
            "no log given; pass a log file, a folder of log files, or - for standard input",
            field="LOG",
        )
    watched, workload, num_gpus = Watched(), None, 1
    if parsed is not None:
        with queries.stored_calibrations(wanted=calibration) as calibrations:
            watched.expected = expected_pace(parsed, calibrations=calibrations)
        problem = resolve_training(parsed)
        workload, num_gpus = problem.workload, problem.cluster.num_gpus
    print_each_change = follow or logs == ["-"]
    steps: dict[int, LogSteps] = {}
    lines = (
        _read_standard_input()
        if logs == ["-"]
        else _read_lines(find_log_files(logs), follow=follow)
    )
    try:
        for log, line in lines:
            each = steps.setdefault(
                log, LogSteps(reader=reader, workload=workload, num_gpus=num_gpus)
            )
            step = each.feed(line)
            watched.in_seconds &= each.in_seconds
            if step is not None and watched.add(log, *step) and print_each_change:
                _print_verdict(watched.verdict(), as_json=as_json, number=watched.job.changes.steps)
    except KeyboardInterrupt:
        pass
    if not watched.sources:
        fix = "check --format"
        if any(each.hugging_face for each in steps.values()):
            fix = (
                "Hugging Face's Trainer prints no step times; add HuggingFaceCallback from "
                "hp_tool.reporter"
            )
        raise InputError(f"no step time in the log: {fix}", field="LOG")
    if unread := sum(each.unread for each in steps.values()):
        typer.echo(
            f"skipped {format_count(unread, 'JSON line')} without a step time (step_s)",
            err=True,
        )
    verdict = watched.verdict()
    _print_verdict(verdict, as_json=as_json, number=None)
    if verdict.slow:
        raise typer.Exit(EXIT_SLOWER)
    return None


def _read_standard_input() -> Iterator[tuple[int, str]]:
    for line in iter(queries.standard_input().readline, b""):
        yield 0, line.decode(errors="replace")


def _read_lines(files: list[Path], *, follow: bool) -> Iterator[tuple[int, str]]:
    """Yield (file number, line) from all files in turn. With `follow`, never stop."""
    offsets, partial_lines = [0] * len(files), [b""] * len(files)
    while True:
        has_new_lines = False
        for number, file in enumerate(files):
            if follow and not file.exists():  # The file may be recreated.
                offsets[number], partial_lines[number] = 0, b""
                continue
            with file.open("rb") as stream:
                if stream.seek(0, SEEK_END) < offsets[number]:  # The file was truncated.
                    offsets[number], partial_lines[number] = 0, b""
                stream.seek(offsets[number])
                content = stream.readlines(1 << 20)
                offsets[number] = stream.tell()
            for line in content:
                has_new_lines = True
                full_line = partial_lines[number] + line
                partial_lines[number] = b""
                if not line.endswith(b"\n"):
                    partial_lines[number] = full_line[-(1 << 16) :]
                    continue
                yield number, full_line.decode(errors="replace")
        if not has_new_lines and not follow:
            yield from (
                (number, line.decode(errors="replace"))
                for number, line in enumerate(partial_lines)
                if line
            )
            return
        if not has_new_lines:
            time.sleep(POLL_S)


def _print_verdict(verdict: Verdict, *, as_json: bool, number: int | None) -> None:
    from hp_tool.questions import schema
    from hp_tool.watch.words import faster_words

    if as_json:
        typer.echo(schema.to_json(verdict))
        return
    if number is not None and not verdict.text:
        typer.echo(f"step {number - 1}: back to the earlier pace")
    for line in (*verdict.text, *filter(None, [faster_words(verdict)])):
        typer.echo(line)


def _print_after_loss(
    query: Query | None, lost_nodes: int, *, calibration: bool, as_json: bool
) -> None:
    from hp_tool.domain.units import format_duration
    from hp_tool.errors import InputError
    from hp_tool.questions import schema
    from hp_tool.watch.loss import after_loss
    from hp_tool.wording.words import layout_arithmetic

    if query is None:
        raise InputError(
            "--lost-nodes requires the job's query; pass --query",
            field="--query",
            code="missing_field",
        )
    with queries.stored_calibrations(wanted=calibration) as calibrations:
        answer = after_loss(query, lost_nodes=lost_nodes, calibrations=calibrations)
    if as_json:
        typer.echo(schema.to_json(answer))
        return
    idle = f", {answer.idle_gpus} idle" if answer.idle_gpus else ""
    typer.echo(
        f"{layout_arithmetic(answer.recommendation.parallel)}{idle}: "
        f"{format_duration(answer.step_s)} per step"
    )
    typer.echo(answer.text)
