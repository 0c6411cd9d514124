"""`hp-tool export RESULT` writes another tool's configuration; `hp-tool import COMMAND` reads one and assesses it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.cli import queries
from hp_tool.errors import InputError

if TYPE_CHECKING:
    from hp_tool.exchange import Assessment


def export(
    result: Annotated[
        str,
        typer.Argument(
            metavar="RESULT", help="Output of recommend, estimate or tune with --json, or a query; - reads standard input."
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="megatron-lm, megatron-lm-yaml, nemo, torchtitan, deepspeed, accelerate, slurm; "
            "for serving vllm, sglang, trtllm.",
        ),
    ],
    rank: Annotated[int, typer.Option(min=1, max=1000, help="Which recommendation.")] = 1,
    as_json: queries.JsonOption = False,
) -> None:
    """Print the configuration as another tool's flags or file; an option that the tool lacks is an error that names it."""
    from hp_tool.exchange import export as write
    from hp_tool.queries import schema

    text = write(result=queries.read_mapping(result), format=format, rank=rank, read=schema.parse_own_query)
    typer.echo(schema.to_json({"format": format, "text": text}) if as_json else text, nl=as_json)


def import_(
    context: typer.Context,
    command: Annotated[
        str,
        typer.Argument(
            metavar="COMMAND",
            help="A Megatron-LM, vLLM or SGLang command, torchtitan TOML or DeepSpeed JSON; - is standard input.",
        ),
    ],
    log: Annotated[str | None, typer.Option(help="The run's log, to read step times and memory from.")] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="megatron-lm, torchtitan, deepspeed, vllm or sglang; guessed by default.")
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
    """Assess what you run: its prediction, the gap to a training's log, and the best configuration for the same work."""
    import yaml

    from hp_tool.exchange import assess, detect, read_query
    from hp_tool.queries import schema

    changes = queries.overrides(queries.flags(context) | {"num_gpus": None}, settings)
    content = queries.read_text(command)
    text = content.decode(errors="replace") if isinstance(content, bytes) else content
    tool = format or detect(text)
    parsed = schema.parse_own_query(read_query(text, format=tool, num_gpus=num_gpus, overrides=changes))
    if query_only:
        typer.echo(yaml.safe_dump(schema.query_mapping(parsed), sort_keys=False), nl=False)
        return
    if log is not None and not Path(log).is_file():
        raise InputError(f"no log at {log}", field="--log")
    with Path(log).open(errors="replace") if log is not None else nullcontext() as lines:
        assessment = assess(parsed, log=lines, reader=tool)
    typer.echo(schema.to_json(assessment)) if as_json else _print(assessment)
    if not assessment.estimate.feasible:
        raise typer.Exit(3)


def _print(assessment: Assessment) -> None:
    from rich.console import Console

    from hp_tool.cli.tables import print_estimate, print_inference_estimate, print_table
    from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
    from hp_tool.render.words import arithmetic, serving_arithmetic
    from hp_tool.units import duration, gib

    console = Console()
    console.print("[bold]prediction[/bold]")
    if isinstance(assessment.estimate, InferenceEstimate):
        print_inference_estimate(assessment.estimate)
    else:
        print_estimate(assessment.estimate)
    if (logged := assessment.logged) is not None:
        console.print("[bold]in the log[/bold]")
        if logged.step_s is not None:
            gap = (
                "" if assessment.step_gap_fraction is None else f", {assessment.step_gap_fraction:+.1%} against the prediction"
            )
            console.print(f"step time {duration(logged.step_s)} (median of {logged.steps} logged){gap}")
        for name in ("allocated", "reserved"):
            if (size := getattr(logged, f"{name}_bytes")) is not None:
                console.print(f"peak {name} memory {gib(size)}")
        if logged.out_of_memory:
            console.print("[red]the run was out of memory[/red]")
        elif logged.step_s is None:
            console.print("no step time found: is --format right?")
    if assessment.better is None:
        console.print("[bold]no configuration is predicted to be faster[/bold]")
        return
    console.print("[bold]better[/bold]")
    if isinstance(assessment.better, ServingRecommendation):
        row = assessment.better
        gain = "" if assessment.gain_fraction is None else f", {assessment.gain_fraction:+.1%} tokens a second"
        console.print(f"{serving_arithmetic(row.parallel, replicas=row.estimate.replicas)}{gain}")
        return
    console.print(arithmetic(assessment.better.parallel))
    best = assessment.better.estimate
    assert best.time is not None and best.memory is not None  # recommendations have both
    gain = "" if assessment.gain_fraction is None else f", {assessment.gain_fraction:+.1%} throughput"
    console.print(f"step time {duration(best.time.step_s)}{gain}, memory {gib(best.memory.total_bytes)}")
    if assessment.switched_on:
        console.print(f"by overlapping communication that the command leaves exposed: {', '.join(assessment.switched_on)}")
    rows = [
        (name.replace("_", " "), f"{seconds:+.3f}")
        for name, seconds in sorted(assessment.parts_gained_s.items(), key=lambda item: -abs(item[1]))
        if abs(seconds) >= 1e-3 * best.time.step_s
    ]
    print_table(console, ("part", "seconds saved per step"), rows, title="where the gain comes from", left=1)
