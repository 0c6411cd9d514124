"""`hp-tool estimate`, `recommend` and `size`: predict one layout, rank layouts, and plan a training
run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hp_tool.api import SIZING_KEYS
from hp_tool.cli import queries

DEFAULT_ROWS = 5
"""Default number of ranked rows on the terminal (--top)."""

if TYPE_CHECKING:
    from hp_tool.domain.query import Query
    from hp_tool.questions.answers import RecommendAnswer


def estimate(
    context: typer.Context,
    query: queries.QueryArgument = None,
    model: queries.Model = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    sequence_length: queries.SequenceLength = None,
    global_batch_size: queries.GlobalBatchSize = None,
    precision: queries.Precision = None,
    total_tokens: queries.TotalTokens = None,
    settings: queries.Setting = None,
    calibration: queries.CalibrationOption = True,
    as_json: queries.JsonOption = False,
) -> None:
    """Predict memory, step time, MFU and cost of one training configuration, or latency and
    throughput of one serving configuration.
    """
    parsed = queries.read_query(query, queries.query_flags(context), settings)

    from hp_tool.domain.serving import InferenceEstimate
    from hp_tool.questions import answers, schema

    with queries.stored_calibrations(wanted=calibration) as calibrations:
        answer = answers.answer_estimate(parsed, calibrations=calibrations)
    if as_json:
        typer.echo(schema.to_json(answer))
    elif isinstance(answer.estimate, InferenceEstimate):
        from hp_tool.cli import serving_tables

        serving_tables.print_inference_estimate(answer.estimate, query=parsed)
    else:
        from hp_tool.cli import tables

        tables.print_estimate(answer.estimate, calibrated=answer.calibrated_estimate)
    if not answer.preferred_estimate.feasible:
        raise typer.Exit(3)


def recommend(
    context: typer.Context,
    query: queries.QueryArgument = None,
    model: queries.Model = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    sequence_length: queries.SequenceLength = None,
    global_batch_size: queries.GlobalBatchSize = None,
    precision: queries.Precision = None,
    total_tokens: queries.TotalTokens = None,
    settings: queries.Setting = None,
    top: Annotated[
        int | None,
        typer.Option(help="Maximum number of rows.", show_default="5; 10 with --json"),
    ] = None,
    pareto: Annotated[
        Literal["memory", "gpus", "throughput"] | None,
        typer.Option(
            help="Also print the Pareto front of step time against memory or GPUs; for serving, of "
            "throughput per user against throughput per GPU."
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also print the step time on other numbers of GPUs, without each axis, and "
            "on better "
            "hardware.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw time and memory by part, the machines, or --sensitivity, into a "
            ".html, .png, "
            ".svg or .pdf file.",
        ),
    ] = None,
    tool: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="FORMAT",
            help="Rank only layouts that the tool of this format supports, such as megatron-lm, "
            "torchtitan or vllm.",
        ),
    ] = None,
    calibration: queries.CalibrationOption = True,
    as_json: queries.JsonOption = False,
) -> None:
    """Rank all legal configurations that fit. Rank 1 is the configuration to try; the others are
    sorted by expected step time.
    """
    limit = top if top is not None else 10 if as_json else DEFAULT_ROWS
    parsed = queries.read_query(query, queries.query_flags(context), settings)

    from hp_tool.catalog.hardware import machine_list_field
    from hp_tool.domain.result import Recommendation
    from hp_tool.questions import answers, schema

    if plot is not None:
        from hp_tool.wording import plots

        plots.check_path(plot)
    with queries.stored_calibrations(wanted=calibration) as calibrations:

        def rank_layouts(query: Query, top: int) -> RecommendAnswer:
            return answers.answer_recommend(
                query, top=top, calibrations=calibrations, pareto=pareto, sensitivity=sensitivity
            )

        if tool is None:
            answer = rank_layouts(parsed, limit)
        else:
            from hp_tool.formats.exchange import recommend_for_tool

            answer, left_out = recommend_for_tool(parsed, tool, rank_layouts, top=limit)
            if left_out:
                typer.echo(
                    f"ignored {', '.join(left_out)} of the query: {tool} has no such setting",
                    err=True,
                )
    if plot is not None and answer.pareto and machine_list_field(parsed.cluster) is not None:
        rows = [row for row in answer.recommendations if isinstance(row, Recommendation)]
        plots.write_figure(
            plots.machines_figure(rows, answer.pareto, title=plots.plot_title(parsed)), path=plot
        )
    elif plot is not None and answer.sensitivity is not None:
        plots.write_figure(
            plots.sensitivity_figure(answer.sensitivity, title=plots.plot_title(parsed)), path=plot
        )
    elif plot is not None and answer.recommendations:
        plots.write_figure(
            plots.recommendations_figure(answer.recommendations, title=plots.plot_title(parsed)),
            path=plot,
        )
    if as_json:
        typer.echo(schema.to_json(answer))
    elif machine_list_field(parsed.cluster) is not None:
        from hp_tool.cli import machine_tables

        machine_tables.print_machines(answer, parsed)
    elif parsed.kind == "inference":
        from hp_tool.cli import serving_tables

        serving_tables.print_serving_recommendations(answer, query=parsed)
    else:
        from hp_tool.cli import tables

        tables.print_recommendations(answer, top=limit)
        tables.print_pareto(answer)
        if answer.sensitivity is not None:
            tables.print_sensitivity(answer.sensitivity)
    if not answer.recommendations and not answer.disaggregated:
        raise typer.Exit(3)


def size(
    context: typer.Context,
    query: queries.QueryArgument = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    days: Annotated[
        float | None,
        typer.Option(
            help="Calendar days: the budget, or the deadline if model and tokens are fixed."
        ),
    ] = None,
    model: queries.Model = None,
    parameters: Annotated[
        float | None, typer.Option(help="Active parameters, such as 7e9.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Length of the training in tokens, such as 1.4e12.")
    ] = None,
    flops: Annotated[float | None, typer.Option(help="Compute: 6 x parameters x tokens.")] = None,
    tokens_per_parameter: Annotated[
        float | None, typer.Option(help="Tokens per parameter. Default: the optimum of the law.")
    ] = None,
    law: Annotated[
        str | None,
        typer.Option(help="Scaling law: chinchilla-1, -2, -3, -corrected (default), or kaplan."),
    ] = None,
    style: Annotated[str | None, typer.Option(help="Model style: llama (default) or gpt.")] = None,
    sequence_length: queries.SequenceLength = None,
    global_batch_size: queries.GlobalBatchSize = None,
    settings: queries.Setting = None,
    calibration: queries.CalibrationOption = True,
    as_json: queries.JsonOption = False,
) -> None:
    """Plan a training for a budget of devices and days, parameters, tokens or FLOPs: model shape,
    tokens, starting hyperparameters, days and cost, including failures. For a fixed model and a
    deadline, find the fewest devices.
    """
    from hp_tool.cli import sizing_tables
    from hp_tool.questions import budgets, schema

    others = ("query", "settings", "calibration", "as_json")
    flags = {name: value for name, value in context.params.items() if name not in others}
    data = {} if query is None else queries.read_mapping(query)
    changes = {
        SIZING_KEYS.get(name, name): value for name, value in flags.items() if value is not None
    }
    parsed = schema.allow_own_files(
        budgets.parse_sizing(
            schema.set_paths(data, changes | queries.query_overrides({}, settings))
        )
    )
    with queries.stored_calibrations(wanted=calibration) as calibrations:
        answer = budgets.answer_sizing(parsed, calibrations=calibrations)
    if as_json:
        typer.echo(schema.to_json(answer))
    else:
        sizing_tables.print_sizing(answer.sizing)
    if not answer.sizing.feasible:
        raise typer.Exit(3)
