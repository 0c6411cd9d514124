"""`hp-tool calibrate`: what stored measurements, and those of a file, teach about each cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.cli import queries

if TYPE_CHECKING:
    from hp_tool.domain.ports import Store
    from hp_tool.domain.query import Query
    from hp_tool.learning import MadeCalibration


def register(app: typer.Typer) -> None:
    """Add `calibrate` to the command line."""
    app.command()(calibrate)


def calibrate(
    measurements: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON lines of {query, parallel, measurement} to store first; - reads stdin."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Only clusters of this GPU.")] = None,
    framework: Annotated[str | None, typer.Option(help="Only measurements of this framework.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="First time single operations on this cluster, and keep its constants.")
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="With --cluster: the engine that reaches it, if not its entry's.")
    ] = None,
    precision: Annotated[list[str] | None, typer.Option(help="With --cluster: matmul inputs to time.")] = None,
    as_json: queries.JsonOption = False,
) -> None:
    """Fit what was measured: a new version for every cluster, software and model family with something new to say.

    Estimates, recommendations and searches take up the newest version by themselves.
    """
    from hp_tool import learning
    from hp_tool.cli import machine
    from hp_tool.queries import schema
    from hp_tool.store import open_store

    report = machine.measure(cluster, launcher=launcher, precisions=precision) if cluster is not None else None
    store = open_store()
    try:
        stored = _import(store, measurements) if measurements is not None else 0
        made = learning.calibrate(store=store, gpu=gpu, framework=framework)
    finally:
        store.close()
    if as_json:
        answer = {"status": "ok", "measurements_stored": stored, "calibrations": [schema.to_dict(each) for each in made]}
        typer.echo(schema.to_json(answer | ({"machine": schema.to_dict(report)} if report is not None else {})))
    else:
        if report is not None:
            machine.show(report)
        _print(made, stored=stored, quiet=report is not None)


def _import(store: Store, path: str) -> int:
    """Store every line; the same line again is the same measurement. Raises InputError that names the line, none stored."""
    from hp_tool.domain.digests import json_digest
    from hp_tool.errors import HpToolError, InputError
    from hp_tool.learning import read_report
    from hp_tool.queries.schema import with_own_files
    from hp_tool.training.problem import self_contained

    def resolve(query: Query) -> Query:
        return self_contained(with_own_files(query))

    read = []
    for number, line in enumerate(queries.read_lines(path), start=1):
        try:
            read.append((read_report(line, source="file", resolve=resolve), f"file:{json_digest(line.decode())}"))
        except UnicodeDecodeError:
            raise InputError(f"line {number} is not UTF-8", field="--measurements") from None
        except HpToolError as error:
            raise InputError(f"line {number}: {error.message}", field=error.field, code=error.code) from None
    for measurement, key in read:
        store.add_measurement(measurement=measurement, idempotency_key=key)
    return len(read)


def _print(made: Sequence[MadeCalibration], *, stored: int, quiet: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from hp_tool.units import counted

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    if stored:
        console.print(f"{counted(stored, 'measurement')} stored", highlight=False)
    if not made and quiet:
        return
    if not made:
        console.print("no measurements to learn from: run `hp-tool tune`, or bring some with --measurements FILE")
        return
    table = Table(title="median error of step time: the cost model alone, and calibrated on the other measurements")
    for name in ("cluster", "software", "models", "version", "measurements", "before", "after"):
        table.add_column(name, justify="right" if name in ("version", "measurements", "before", "after") else "left")
    for each in made:
        record, accuracy = each.record, each.accuracy
        table.add_row(
            record.cluster_key,
            record.framework,
            f"{record.model_family}: {', '.join(each.models)}",
            f"{record.version}{'' if each.new else ' (as before)'}",
            str(record.num_measurements),
            _percent(accuracy.error_before),
            _percent(accuracy.error_after),
        )
    console.print(table)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
