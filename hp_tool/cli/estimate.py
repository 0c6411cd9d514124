"""`hp-tool estimate QUERY`: memory and step time of one configuration."""

from __future__ import annotations

import typer

from hp_tool.cli import queries
from hp_tool.cli.calibrations import CalibrationOption, stored_calibrations


def register(app: typer.Typer) -> None:
    """Add `estimate` to the command line."""
    app.command()(estimate)


def estimate(
    query: queries.QueryArgument = None,
    model: queries.Model = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    sequence_length: queries.SequenceLength = None,
    global_batch_size: queries.GlobalBatchSize = None,
    precision: queries.Precision = None,
    total_tokens: queries.TotalTokens = None,
    settings: queries.Setting = None,
    calibration: CalibrationOption = True,
    as_json: queries.JsonOption = False,
) -> None:
    """Predict memory, step time, MFU and cost of the configuration a query describes, or latency and throughput of serving."""
    from hp_tool import answers
    from hp_tool.cli.serving import print_inference_estimate
    from hp_tool.cli.tables import print_estimate
    from hp_tool.domain.serving import InferenceEstimate
    from hp_tool.queries import schema

    flags = {
        "model": model, "gpu": gpu, "num_gpus": num_gpus, "sequence_length": sequence_length,
        "global_batch_size": global_batch_size, "precision": precision, "total_tokens": total_tokens,
    }  # fmt: skip
    parsed = queries.read_query(query, flags, settings)
    with stored_calibrations(wanted=calibration) as calibrations:
        answer = answers.estimate_answer(parsed, calibrations=calibrations)
    if as_json:
        typer.echo(schema.to_json(answer))
    elif isinstance(answer.estimate, InferenceEstimate):
        print_inference_estimate(answer.estimate)
    else:
        print_estimate(answer.estimate, calibrated=answer.calibrated_estimate)
    if not (answer.calibrated_estimate or answer.estimate).feasible:
        raise typer.Exit(3)
