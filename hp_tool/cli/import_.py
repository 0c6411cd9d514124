"""`hp-tool import COMMAND`: what someone already runs, as a query; and whether it is any good."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.cli import queries
from hp_tool.errors import InputError

if TYPE_CHECKING:
    from hp_tool.exchange.imports import Assessment


def register(app: typer.Typer) -> None:
    """Add `import` to the command line."""
    app.command(name="import")(import_)


def import_(
    command: Annotated[
        str,
        typer.Argument(
            metavar="COMMAND", help="A Megatron-LM launch script, a torchtitan TOML or DeepSpeed JSON file; - reads stdin."
        ),
    ],
    log: Annotated[str | None, typer.Option(help="The run's log: step times and memory are read from it.")] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="megatron-lm, torchtitan or deepspeed; guessed where left out.")
    ] = None,
    query_only: Annotated[bool, typer.Option("--query", help="Print the query as YAML and stop.")] = False,
    model: queries.Model = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    sequence_length: queries.SequenceLength = None,
    total_tokens: queries.TotalTokens = None,
    settings: queries.Setting = None,
    as_json: queries.JsonOption = False,
) -> None:
    """Is what I run any good? Prediction, gap to the log, and the best configuration for the same work; no cluster needed."""
    import yaml

    from hp_tool.exchange.imports import assess, detect, read_query
    from hp_tool.queries import schema

    given = queries.overrides(
        {"model": model, "gpu": gpu, "sequence_length": sequence_length, "total_tokens": total_tokens}, settings
    )
    content = queries.read_text(command)
    text = content.decode(errors="replace") if isinstance(content, bytes) else content
    tool = format or detect(text)
    parsed = schema.parse_own_query(read_query(text, format=tool, num_gpus=num_gpus, overrides=given))
    if query_only:
        typer.echo(yaml.safe_dump(schema.query_mapping(parsed), sort_keys=False), nl=False)
        return
    if log is not None and not Path(log).is_file():
        raise InputError(f"no log at {log}", field="--log")
    with Path(log).open(errors="replace") if log is not None else nullcontext() as lines:
        found = assess(parsed, log=lines, reader=tool)
    typer.echo(schema.to_json(found)) if as_json else _print(found)
    if not found.estimate.feasible:
        raise typer.Exit(3)


def _print(found: Assessment) -> None:
    from rich.console import Console
    from rich.table import Table

    from hp_tool.cli.tables import print_estimate
    from hp_tool.render.words import arithmetic
    from hp_tool.units import duration, gib

    console = Console()
    console.print("[bold]what runs, as predicted[/bold]")
    print_estimate(found.estimate)
    if found.logged is not None:
        console.print("[bold]what the log says[/bold]")
        if found.logged.step_s is not None:
            gap = "" if found.step_gap_fraction is None else f", {found.step_gap_fraction:+.1%} against the prediction"
            console.print(f"step time {duration(found.logged.step_s)} (median of {found.logged.steps} logged){gap}")
        for name in ("allocated", "reserved"):
            if (size := getattr(found.logged, f"{name}_bytes")) is not None:
                console.print(f"peak {name} memory {gib(size)}")
        if found.logged.out_of_memory:
            console.print("[red]it ran out of memory[/red]")
        elif found.logged.step_s is None:
            console.print("no step time in it: is --format right?")
    if found.better is None:
        console.print("[bold]no configuration is predicted to be faster[/bold]")
        return
    console.print("[bold]better[/bold]")
    console.print(arithmetic(found.better.parallel))
    best = found.better.estimate
    assert best.time is not None and best.memory is not None  # recommendations have both
    gain = "" if found.gain_fraction is None else f", {found.gain_fraction:+.1%} throughput"
    console.print(f"step time {duration(best.time.step_s)}{gain}, memory {gib(best.memory.total_bytes)}")
    if found.switched_on:
        console.print(f"with communication hidden that the command leaves exposed: {', '.join(found.switched_on)}")
    table = Table(title="where it comes from")
    table.add_column("part")
    table.add_column("seconds won a step", justify="right")
    for name, seconds in sorted(found.parts_gained_s.items(), key=lambda item: -abs(item[1])):
        if abs(seconds) >= 1e-3 * best.time.step_s:
            table.add_row(name.replace("_", " "), f"{seconds:+.3f}")
    console.print(table)
