"""`hp-tool size QUERY`: the training that a budget buys."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hp_tool.cli import queries
from hp_tool.cli.calibrations import CalibrationOption, stored_calibrations

FLAGS = {"gpu": "cluster.gpu", "num_gpus": "cluster.num_gpus"}
"""Flags that are not keys of a sizing query themselves."""


def register(app: typer.Typer) -> None:
    """Add `size` to the command line."""
    app.command()(size)


def size(
    query: queries.QueryArgument = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    days: Annotated[float | None, typer.Option(help="Calendar days: the budget, or with a training the deadline.")] = None,
    model: queries.Model = None,
    parameters: Annotated[float | None, typer.Option(help="Those a token passes, such as 7e9.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Length of the training, such as 1.4e12.")] = None,
    flops: Annotated[float | None, typer.Option(help="Compute, 6 x parameters x tokens.")] = None,
    tokens_per_parameter: Annotated[float | None, typer.Option(help="Over-training; default: the law's optimum.")] = None,
    law: Annotated[str | None, typer.Option(help="chinchilla-1, -2, -3, -corrected (default), or kaplan.")] = None,
    style: Annotated[str | None, typer.Option(help="llama (default) or gpt.")] = None,
    sequence_length: queries.SequenceLength = None,
    global_batch_size: queries.GlobalBatchSize = None,
    settings: queries.Setting = None,
    calibration: CalibrationOption = True,
    as_json: queries.JsonOption = False,
) -> None:
    """From devices and days, parameters, tokens or FLOPs: a model's shape, its tokens, starting hyperparameters, and the days
    and cost of training it, failures included. With days and a training: the fewest devices.
    """
    from hp_tool import budgets
    from hp_tool.cli.sized import print_sizing
    from hp_tool.queries import schema

    flags = {
        "gpu": gpu, "num_gpus": num_gpus, "days": days, "model": model, "parameters": parameters, "tokens": tokens,
        "flops": flops, "tokens_per_parameter": tokens_per_parameter, "law": law, "style": style,
        "sequence_length": sequence_length, "global_batch_size": global_batch_size,
    }  # fmt: skip
    data: dict[str, Any] = {} if query is None else schema.parse_mapping(queries.read_text(query))
    given = {FLAGS.get(name, name): value for name, value in flags.items() if value is not None}
    parsed = schema.with_own_files(budgets.parse_sizing(schema.lay(data, given | queries.overrides({}, settings))))
    with stored_calibrations(wanted=calibration) as calibrations:
        answer = budgets.size_answer(parsed, calibrations=calibrations)
    if as_json:
        typer.echo(schema.to_json(answer))
    else:
        print_sizing(answer.sizing)
    if not answer.sizing.feasible:
        raise typer.Exit(3)
