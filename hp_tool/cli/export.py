"""`hp-tool export RESULT --format F`: a chosen configuration in the words of the tool that will run it."""

from __future__ import annotations

from typing import Annotated

import typer

from hp_tool.cli import queries


def register(app: typer.Typer) -> None:
    """Add `export` to the command line."""
    app.command()(export)


def export(
    result: Annotated[
        str,
        typer.Argument(metavar="RESULT", help="What recommend, estimate or tune printed with --json, or a query; - is stdin."),
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
    """Print the configuration as another tool's flags or file; what that tool cannot say is refused by name."""
    from hp_tool.exchange.exports import export as write
    from hp_tool.queries import schema

    given = schema.parse_mapping(queries.read_text(result))
    text = write(result=given, format=format, rank=rank, read=schema.parse_own_query)
    typer.echo(schema.to_json({"format": format, "text": text}) if as_json else text, nl=as_json)
