"""`hp-tool recommend QUERY`: the best configurations by the cost model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hp_tool.cli import queries
from hp_tool.cli.calibrations import CalibrationOption, stored_calibrations


def register(app: typer.Typer) -> None:
    """Add `recommend` to the command line."""
    app.command()(recommend)


def recommend(
    query: queries.QueryArgument = None,
    model: queries.Model = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    sequence_length: queries.SequenceLength = None,
    global_batch_size: queries.GlobalBatchSize = None,
    precision: queries.Precision = None,
    total_tokens: queries.TotalTokens = None,
    settings: queries.Setting = None,
    top: Annotated[int, typer.Option(help="Rows at most.")] = 10,
    pareto: Annotated[
        Literal["memory", "gpus", "throughput"] | None,
        typer.Option(
            help="Also what no other beats in step time and memory, or devices; of serving, throughput by user and GPU."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture of time and memory by part: .html, .png, .svg or .pdf.")
    ] = None,
    calibration: CalibrationOption = True,
    as_json: queries.JsonOption = False,
) -> None:
    """Rank all legal configurations that fit, fastest first."""
    from hp_tool import answers
    from hp_tool.cli.serving import print_serving_recommendations
    from hp_tool.cli.tables import print_front, print_recommendations
    from hp_tool.queries import schema
    from hp_tool.render import plots

    flags = {
        "model": model, "gpu": gpu, "num_gpus": num_gpus, "sequence_length": sequence_length,
        "global_batch_size": global_batch_size, "precision": precision, "total_tokens": total_tokens,
    }  # fmt: skip
    parsed = queries.read_query(query, flags, settings)
    if plot is not None:
        plots.check_path(plot)
    with stored_calibrations(wanted=calibration) as calibrations:
        answer = answers.recommend_answer(parsed, top=top, calibrations=calibrations, pareto=pareto)
    if plot is not None and answer.recommendations:
        plots.write(plots.recommendations_figure(answer.recommendations, title=plots.title(parsed)), path=plot)
    if as_json:
        typer.echo(schema.to_json(answer))
    elif parsed.kind == "inference":
        print_serving_recommendations(answer)
    else:
        print_recommendations(answer)
        print_front(answer)
    if not answer.recommendations and not answer.disaggregated:
        raise typer.Exit(3)
