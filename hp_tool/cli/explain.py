"""`hp-tool explain TRACE...`: compare the measured and predicted times of a recorded step, by
part.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.cli import queries
from hp_tool.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from hp_tool.domain.query import Query
    from hp_tool.domain.result import Estimate
    from hp_tool.traces.explain.explanation import Explanation
    from hp_tool.traces.explain.logged import LoggedExplanation


def explain(
    context: typer.Context,
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Traces of torch.profiler (one per rank, gzip or not), reports of Nsight Systems "
            "exported to SQLite, or one log with Megatron's timers.",
        ),
    ],
    query: Annotated[
        str | None,
        typer.Option("--query", metavar="FILE", help="Query of the recorded configuration."),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="SCRIPT",
            help="Launch script or configuration file of the recorded run, instead of --query.",
        ),
    ] = None,
    model: queries.Model = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    sequence_length: queries.SequenceLength = None,
    global_batch_size: queries.GlobalBatchSize = None,
    precision: queries.Precision = None,
    settings: queries.Setting = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Store the step and its parts as a measurement, and fit a new calibration. "
            "A trace "
            "is rejected if its device, number of ranks or model differs from the query, or if "
            "it has no backward pass or optimizer step.",
        ),
    ] = False,
    as_json: queries.JsonOption = False,
) -> None:
    """Split recorded steps into the parts of a prediction. Report which parts differ, why, and how
    much time suggested changes save. Without a query, compare ranks and groups with each other.
    """
    from hp_tool.formats.timers import is_log
    from hp_tool.questions import schema
    from hp_tool.traces.explain.logged import LoggedExplanation
    from hp_tool.traces.explain.recorded import explain_files

    if query is not None and script is not None:
        raise InputError("pass --query or --import, not both", field="--import")
    flags = queries.query_flags(context)
    parsed: Query | None = None
    tool = None
    if script is not None:
        parsed, tool = _import_query(script, flags, settings)
    elif query is not None or any(value is not None for value in flags.values()) or settings:
        parsed = queries.read_query(query, flags, settings)
    if learn and parsed is None:
        raise InputError(
            "--learn requires the recorded configuration; pass --query or --import",
            field="--learn",
        )
    if learn and is_log(traces[0]):
        raise InputError(
            "--learn requires a trace; the timers in a log do not cover every part of a step",
            field="--learn",
        )
    answer = explain_files(traces, query=parsed, tool=tool)
    if as_json:
        typer.echo(schema.to_json(answer))
    elif isinstance(answer, LoggedExplanation):
        _print_log(answer)
    else:
        _print_explanation(answer)
    if learn and not isinstance(answer, LoggedExplanation):
        _store_measurement(answer)


def _store_measurement(answer: Explanation) -> None:
    """Store the measured step like `hp-tool calibrate --measurements`, fit a calibration, and
    report the outcome on standard error.

    Raises:
        InputError: The trace is from another training run than the query's.
    """
    from hp_tool.cli.calibrate import import_measurements
    from hp_tool.extras import require
    from hp_tool.traces.explain.checks import refusal_reasons

    if answer.teaches == "refused":
        raise InputError(
            f"not stored, because the trace is not from the training in the query: "
            f"{refusal_reasons(answer.checks)}",
            field="--learn",
        )
    require("search", by="`hp-tool explain --learn`")
    from hp_tool.loop import learning
    from hp_tool.store import open_store

    hold = answer.teaches == "held"
    with closing(open_store()) as store:
        imported = import_measurements(store, [json.dumps(answer.report).encode()], hold=hold)
        learning.calibrate(store=store)
    for record in imported.stored:
        typer.echo(
            f"stored as measurement {record.id} ({record.state}): see `hp-tool measurements`",
            err=True,
        )
        if hold and record.state == "held":
            typer.echo(
                f"held, because the trace cannot be checked: {refusal_reasons(answer.checks)}. "
                f"If it is of "
                "the query's training, apply "
                f"it with `hp-tool measurements --accept {record.id}`",
                err=True,
            )
    if not imported.stored:
        raise typer.Exit(2)


def _import_query(
    script: str, flags: dict[str, object], settings: list[str] | None
) -> tuple[Query, str]:
    """Return the query for a launch script, and the name of its tool."""
    from hp_tool.cli.script_files import add_base_names, find_script_files
    from hp_tool.formats.exchange import read_configuration
    from hp_tool.questions import schema

    content = queries.read_text(script)
    text = content.decode(errors="replace") if isinstance(content, bytes) else content
    script_files = {} if script == "-" else find_script_files(Path(script), text)
    devices = flags.get("num_gpus")
    changes = queries.query_overrides(flags | {"num_gpus": None}, settings)
    reading = read_configuration(
        text,
        num_gpus=devices if isinstance(devices, int) else None,
        overrides=changes,
        files=add_base_names(script_files),
    )
    return schema.parse_own_query(reading.query), reading.tool


def _print_explanation(answer: Explanation) -> None:
    from hp_tool.cli.layout import make_console, print_flags, print_table
    from hp_tool.domain.parts import PARTS, label
    from hp_tool.domain.units import MIN_CHANGE, format_count, format_duration
    from hp_tool.traces.explain.findings import saving_words

    console = make_console()
    step = answer.critical
    work = "" if answer.workload in ("training", "unknown") else f"{answer.workload}: "
    steps = (
        format_count(answer.steps, "step") if answer.marked else "no step marks: complete recording"
    )
    pace = f" Rank {answer.critical_rank} sets the pace." if len(answer.ranks) > 1 else ""
    console.print(
        f"[bold]{work}{format_duration(answer.step_s)} per step[/bold] ({steps}, "
        f"{format_count(len(answer.ranks), 'rank')}).{pace}",
        highlight=False,
    )
    if not answer.findings:
        console.print("No rank, group or part deviates.")
    for number, finding in enumerate(answer.findings, start=1):
        console.print(f"{number}. {finding.text}", highlight=False, markup=False, soft_wrap=True)
    for suggestion in answer.suggestions:
        console.print(
            f"[bold]{suggestion.change}[/bold] saves {saving_words(suggestion)}, mostly "
            f"{PARTS[suggestion.part].in_words}",
            highlight=False,
        )
        print_flags(console, suggestion.flags)
    predicted = {
        part.name: part.predicted_s for part in answer.parts if part.predicted_s is not None
    }
    rows = []
    for part, seconds in step.parts_s.items():
        if (
            max(seconds, predicted.get(part, 0.0), step.hidden_s.get(part, 0.0))
            < MIN_CHANGE * answer.step_s
        ):
            continue
        shown = [label(part), f"{seconds * 1e3:,.1f}"]
        if predicted:
            shown += [f"{predicted[part] * 1e3:,.1f}", f"{(seconds - predicted[part]) * 1e3:+,.1f}"]
        rows.append(
            (*shown, f"{step.hidden_s[part] * 1e3:,.1f}" if step.hidden_s.get(part) else "-")
        )
    total = ["step", f"{answer.step_s * 1e3:,.1f}"]
    if predicted:
        sum_s = sum(predicted.values())
        total += [f"{sum_s * 1e3:,.1f}", f"{(answer.step_s - sum_s) * 1e3:+,.1f}"]
    heads = (
        "part",
        "measured, ms",
        *(("predicted, ms", "difference, ms") if predicted else ()),
        "hidden, ms",
    )
    print_table(
        console,
        heads,
        [*rows, (*total, "-")],
        title=f"One step on rank {answer.critical_rank}",
        left=1,
    )
    _print_predicted(console, answer.estimate)
    if len(answer.ranks) > 1:
        _print_ranks(answer)
    if answer.links:
        _print_links(answer)
    if answer.matmul_flops_per_second is not None:
        share = (
            ""
            if answer.tensor_core_share is None
            else f", {answer.tensor_core_share:.0%} of the device's peak"
        )
        console.print(
            f"Matmuls run at {answer.matmul_flops_per_second / 1e12:,.1f} TFLOP/s{share}.",
            highlight=False,
        )


def _print_predicted(console: Console, estimate: Estimate | None) -> None:
    """Print the layout of the prediction, because the query may leave it open."""
    from hp_tool.wording.words import layout_arithmetic

    if estimate is not None and estimate.parallel is not None:
        console.print(
            f"Predicted for {layout_arithmetic(estimate.parallel)}", highlight=False, soft_wrap=True
        )


def _print_log(answer: LoggedExplanation) -> None:
    from hp_tool.cli.layout import make_console, print_table
    from hp_tool.domain.parts import PARTS
    from hp_tool.domain.units import format_duration

    console = make_console()
    has_prediction = answer.estimate is not None
    rows = [
        (
            PARTS[part.name].in_words,
            *(
                "-" if seconds is None else f"{seconds * 1e3:,.1f}"
                for seconds in (
                    (part.measured_s, part.predicted_s) if has_prediction else (part.measured_s,)
                )
            ),
        )
        for part in answer.parts
    ]
    heads = ("part", "measured, ms", *(("predicted, ms",) if has_prediction else ()))
    print_table(
        console,
        heads,
        rows,
        title=f"One step of {format_duration(answer.step_s)} by Megatron's timers",
        left=1,
    )
    _print_predicted(console, answer.estimate)
    spreads = [
        (
            timer.timer,
            "-" if timer.shortest_s is None else f"{timer.shortest_s * 1e3:,.1f}",
            f"{timer.longest_s * 1e3:,.1f}",
            "-" if timer.longest_rank is None else str(timer.longest_rank),
        )
        for timer in answer.timers
    ]
    print_table(
        console,
        ("timer", "shortest, ms", "longest, ms", "on rank"),
        spreads,
        title="Timers over all ranks",
        left=1,
    )
    for number, finding in enumerate(answer.findings, start=1):
        console.print(f"{number}. {finding.text}", highlight=False, markup=False, soft_wrap=True)


def _print_ranks(answer: Explanation) -> None:
    from hp_tool.cli.layout import make_console, print_table
    from hp_tool.domain.parts import PARTS

    computed = [key for key, part in PARTS.items() if part.computes]
    rows = [
        (
            str(rank.rank),
            *(
                f"{seconds * 1e3:,.1f}"
                for seconds in (
                    rank.step_s,
                    sum(rank.parts_s[part] for part in computed),
                    sum(rank.waits_s.values()),
                    rank.parts_s["overhead"],
                    rank.host_s,
                )
            ),
        )
        for rank in sorted(answer.ranks, key=lambda each: -each.own_s)[:16]
    ]
    heads = ("rank", "step, ms", "compute, ms", "waits, ms", "idle, ms", "host late, ms")
    print_table(
        make_console(), heads, rows, title="Ranks, longest step without waits first", left=1
    )


def _print_links(answer: Explanation) -> None:
    from hp_tool.cli.layout import make_console, print_table

    rows = [
        (
            f"{link.part.replace('_', ' ')}: {link.operation.replace('_', ' ')}",
            str(len(link.ranks) or "-"),
            f"{link.messages:,.0f}",
            f"{link.size_bytes / 1e6:,.2f}" if link.size_bytes is not None else "-",
            f"{link.seconds * 1e3:,.1f}",
            f"{link.bytes_per_second / 1e9:,.1f}" if link.bytes_per_second is not None else "-",
        )
        for link in answer.links[:12]
    ]
    heads = ("collective", "ranks", "per step", "MB each", "ms per step", "GB/s")
    print_table(
        make_console(),
        heads,
        rows,
        title="Collectives of this rank without waits; GB/s is the bus bandwidth",
        left=1,
    )
