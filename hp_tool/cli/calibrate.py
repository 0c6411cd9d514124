"""`hp-tool calibrate` and `measurements`: fit stored measurements, select the measurements that
calibrations use, and run micro-benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hp_tool.cli import queries
from hp_tool.extras import require

if TYPE_CHECKING:
    from hp_tool.domain.measurement_records import Imported, MeasurementRecord
    from hp_tool.domain.ports import Store
    from hp_tool.loop.learning import MadeCalibration
    from hp_tool.loop.learning.machine import MachineReport
    from hp_tool.questions.answers import Line


State = Literal["accepted", "held", "excluded", "deleted"]


def calibrate(
    measurements: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines of {query, parallel, measurement} to store first; - reads stdin.",
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Fit only measurements on this GPU.")] = None,
    framework: Annotated[
        str | None, typer.Option(help="Fit only measurements of this framework.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="First run micro-benchmarks on this cluster and store its fitted constants.",
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="With --cluster: launcher. Default: that of the cluster's entry."),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="With --cluster: precision of the matmuls to benchmark; repeatable."),
    ] = None,
    as_json: queries.JsonOption = False,
) -> None:
    """Fit the stored measurements. Each cluster, framework and model family with new measurements
    gets a new calibration version.

    Estimates, recommendations and searches use the newest version. Each line of a file is stored or
    rejected separately.
    """
    require("search", by="`hp-tool calibrate`")
    from hp_tool.domain.measurement_records import Imported
    from hp_tool.loop import learning
    from hp_tool.questions import schema
    from hp_tool.store import open_store

    report = (
        _benchmark(cluster, launcher=launcher, precisions=precision)
        if cluster is not None
        else None
    )
    with closing(open_store()) as store:
        imported = (
            import_measurements(store, queries.read_lines(measurements))
            if measurements is not None
            else Imported(stored=(), refused=())
        )
        made = learning.calibrate(store=store, gpu=gpu, framework=framework)
    if as_json:
        held_back = [record.id for record in imported.stored if record.state == "held"]
        answer = {
            "status": "ok",
            "measurements_stored": len(imported.stored),
            "measurements_held": held_back,
            "measurements_refused": [schema.to_dict(each) for each in imported.refused],
            "calibrations": [schema.to_dict(each) for each in made],
        }
        typer.echo(
            schema.to_json(
                answer | ({"machine": schema.to_dict(report)} if report is not None else {})
            )
        )
    else:
        if report is not None:
            _print_report(report)
        _print_calibrations(made, imported=imported, quiet=report is not None)
    if imported.refused and not imported.stored:
        raise typer.Exit(2)


def measurements(
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="Use this measurement, even if it was held, excluded or deleted."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Do not use this measurement; lists still show it."),
    ] = None,
    delete: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Do not use this measurement; lists omit it."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="List only measurements on this GPU.")] = None,
    model: Annotated[str | None, typer.Option(help="List only measurements of this model.")] = None,
    framework: Annotated[
        str | None, typer.Option(help="List only measurements of this framework.")
    ] = None,
    state: Annotated[
        State | None, typer.Option(help="List only measurements in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of rows.")] = 20,
    as_json: queries.JsonOption = False,
) -> None:
    """List stored measurements, newest first. Accept, exclude or delete measurements.

    A change creates a new version of the calibration at once. Earlier versions remain available.
    """
    require("search", by="`hp-tool measurements`")
    from hp_tool.loop import learning
    from hp_tool.questions import schema
    from hp_tool.store import open_store

    changes: list[tuple[State, str]] = [
        *(("accepted", each) for each in accept or ()),
        *(("excluded", each) for each in exclude or ()),
        *(("deleted", each) for each in delete or ()),
    ]
    with closing(open_store()) as store:
        for _, identity in changes:
            store.get_measurement(measurement_id=identity)  # If one is unknown, nothing is changed.
        changed = [
            store.set_measurement_state(measurement_id=identity, state=wanted)
            for wanted, identity in changes
        ]
        made = learning.refit(store=store) if changed else ()
        page = store.measurements(
            gpu=gpu, model=model, framework=framework, state=state, limit=limit
        )
    shown = changed or page.items
    if as_json:
        rows = [schema.to_dict(record) | {"warnings": record.warnings} for record in shown]
        fitted = [schema.to_dict(each) for each in made]
        typer.echo(schema.to_json({"status": "ok", "measurements": rows, "calibrations": fitted}))
        return
    _print_measurements(shown)
    for each in made:
        if each.new:
            typer.echo(
                f"calibration of {each.record.cluster_key}, {each.record.framework}: version "
                f"{each.record.version}"
            )


def _print_measurements(records: Sequence[MeasurementRecord]) -> None:
    from hp_tool.cli.layout import make_console, print_table
    from hp_tool.domain.units import format_duration

    console = make_console()
    if not records:
        console.print(
            "no measurements: run `hp-tool tune`, or import some with `hp-tool calibrate "
            "--measurements FILE`"
        )
        return
    rows = []
    for record in records:
        measured_s, predicted_s = record.measurement.objective_s, record.predicted.get("step_s")
        off = f"{predicted_s / measured_s - 1.0:+.1%}" if measured_s and predicted_s else "-"
        rows.append(
            (
                record.id,
                f"{record.created_at:%Y-%m-%d %H:%M}",
                record.state,
                record.model,
                record.gpu,
                record.framework,
                record.measurement.status,
                format_duration(measured_s) if measured_s else "-",
                off,
            )
        )
    heads = (
        "id",
        "measured (UTC)",
        "state",
        "model",
        "GPU",
        "framework",
        "ended",
        "step",
        "error of the cost model",
    )
    print_table(console, heads, rows, title="measurements, newest first", left=7)
    for record in records:
        for warning in record.warnings:
            console.print(f"{record.id}: {warning}", highlight=False, markup=False)


def import_measurements(store: Store, lines: Iterable[Line], *, hold: bool = False) -> Imported:
    """Store the measurement in every valid line; a repeated line counts once. Print the reasons for
    rejected lines to standard error.

    With `hold`, calibrations do not use the measurements until a user accepts them.
    """
    from hp_tool.domain.digests import json_digest
    from hp_tool.loop.learning import add_reports
    from hp_tool.questions.schema import allow_own_files
    from hp_tool.questions.training.problem import inline_files

    imported = add_reports(
        lines,
        store=store,
        source="file",
        key=lambda _, line: f"file:{json_digest(line.decode())}",
        resolve=lambda query: inline_files(allow_own_files(query)),
        hold=hold,
    )
    for refused in imported.refused:
        where = (
            f" ({refused.field})" if refused.field and refused.field not in refused.message else ""
        )
        typer.echo(f"line {refused.line} rejected: {refused.message}{where}", err=True)
    for record in imported.stored:
        for warning in record.warnings:
            typer.echo(f"measurement {record.id}: {warning}", err=True)
    return imported


def _print_calibrations(
    made: Sequence[MadeCalibration], *, imported: Imported, quiet: bool
) -> None:
    from hp_tool.cli.layout import make_console, print_table
    from hp_tool.domain.units import format_count

    console = make_console()
    if imported.stored or imported.refused:
        number = sum(record.state == "held" for record in imported.stored)
        held_back = (
            f", {number} of them held: see `hp-tool measurements --state held`" if number else ""
        )
        refused = (
            f", {format_count(len(imported.refused), 'line')} rejected" if imported.refused else ""
        )
        console.print(
            f"{format_count(len(imported.stored), 'measurement')} stored{held_back}{refused}",
            highlight=False,
        )
    if not made:
        if not quiet:
            console.print(
                "no measurements to calibrate with: run `hp-tool tune`, or pass --measurements FILE"
            )
        return
    rows = [
        (
            each.record.cluster_key,
            each.record.framework,
            f"{each.record.model_family}: {', '.join(each.models)}",
            f"{each.record.version}{'' if each.new else ' (as before)'}",
            str(each.record.num_measurements),
            _format_percent(each.accuracy.error_before),
            _format_percent(each.accuracy.error_after),
        )
        for each in made
    ]
    heads = ("cluster", "software", "models", "version", "measurements", "before", "after")
    title = "median error of step times: cost model alone, and calibrated on the other measurements"
    print_table(console, heads, rows, title=title, left=3)


def _format_percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def _benchmark(
    name: str, *, launcher: str | None, precisions: Sequence[str] | None
) -> MachineReport:
    """Run micro-benchmarks and one training step on the cluster, and store the fitted constants."""
    from hp_tool import catalog
    from hp_tool.catalog.efficiency import save_machine_profile
    from hp_tool.loop.learning import machine
    from hp_tool.loop.tuning.clusters import check_profiled, cluster_launcher

    cluster = catalog.cluster(name)
    check_profiled(cluster.gpu)
    cpu = cluster.gpu.kind == "cpu"
    chosen = machine.checked_precisions(
        precisions or (("fp32",) if cpu else ("bf16",)), gpu=cluster.gpu
    )
    engine = cluster_launcher(name, name=launcher)
    typer.echo(f"benchmarking operations on {cluster.num_gpus} x {cluster.gpu.name} ...", err=True)
    report, _ = machine.benchmark_machine(cluster=cluster, launcher=engine, precisions=chosen)
    typer.echo("running one training step ...", err=True)
    check = machine.check_step(
        cluster=cluster, launcher=engine, profile=report.profile, precision=chosen[0]
    )
    path = save_machine_profile(cluster.name, report.profile)
    typer.echo(f"stored in {path}", err=True)
    return replace(report, check=check)


def _print_report(report: MachineReport) -> None:
    from hp_tool.cli.layout import make_console, print_table

    console = make_console()
    rows = [(fit, str(count), f"{error:.1%}") for fit, (count, error) in report.errors.items()]
    title = f"cluster {report.cluster}: measured efficiency, {report.wall_s:.0f} s"
    print_table(console, ("fit", "operations", "median error"), rows, title=title, left=1)
    for outlier in report.outliers:
        console.print(
            f"slow {outlier.kind}: {outlier.name} takes {outlier.slowdown:.2f} times as long as "
            f"its peers "
            f"({outlier.operations} operations)",
            highlight=False,
            markup=False,
        )
    if not report.outliers:
        console.print("preflight: no node, device or link is slower than its peers")
    if (check := report.check) is not None:
        console.print(
            f"one training step ({check.what}): measured {check.measured_s * 1e3:.1f} ms; "
            "predicted "
            f"{check.before_s * 1e3:.1f} ms before ({check.before_s / check.measured_s - 1:+.1%}), "
            f"{check.after_s * 1e3:.1f} ms after ({check.after_s / check.measured_s - 1:+.1%})",
            highlight=False,
        )
