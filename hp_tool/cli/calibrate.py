"""`hp-tool calibrate`: corrections of predictions by stored measurements, those of a file, and micro-benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.cli import queries

if TYPE_CHECKING:
    from hp_tool.domain.ports import Store
    from hp_tool.learning import MadeCalibration
    from hp_tool.learning.machine import MachineReport


def calibrate(
    measurements: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON lines of {query, parallel, measurement} to store first; - reads stdin."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Only clusters of this GPU.")] = None,
    framework: Annotated[str | None, typer.Option(help="Only measurements of this framework.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="First time single operations on this cluster, and store its efficiency.")
    ] = None,
    launcher: Annotated[str | None, typer.Option(help="With --cluster: the launcher, if not the one of its entry.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="With --cluster: matmul inputs to time.")] = None,
    as_json: queries.JsonOption = False,
) -> None:
    """Fit the measurements: a new version for every cluster, software and model family with new measurements.

    Estimates, recommendations and searches use the newest version.
    """
    from hp_tool import learning
    from hp_tool.queries import schema
    from hp_tool.store import open_store

    report = _benchmark(cluster, launcher=launcher, precisions=precision) if cluster is not None else None
    with closing(open_store()) as store:
        stored = _import(store, measurements) if measurements is not None else 0
        made = learning.calibrate(store=store, gpu=gpu, framework=framework)
    if as_json:
        answer = {"status": "ok", "measurements_stored": stored, "calibrations": [schema.to_dict(each) for each in made]}
        typer.echo(schema.to_json(answer | ({"machine": schema.to_dict(report)} if report is not None else {})))
    else:
        if report is not None:
            _print_report(report)
        _print(made, stored=stored, quiet=report is not None)


def _import(store: Store, path: str) -> int:
    """Store the measurement of every line, each line once. Raises InputError with the number of a bad line, and stores none."""
    from hp_tool.domain.digests import json_digest
    from hp_tool.errors import HpToolError, InputError
    from hp_tool.learning import read_report
    from hp_tool.queries.schema import with_own_files
    from hp_tool.training.problem import self_contained

    read = []
    for number, line in enumerate(queries.read_lines(path), start=1):
        try:
            report = read_report(line, source="file", resolve=lambda query: self_contained(with_own_files(query)))
            read.append((report, f"file:{json_digest(line.decode())}"))
        except UnicodeDecodeError:
            raise InputError(f"line {number} is not UTF-8", field="--measurements") from None
        except HpToolError as error:
            raise InputError(f"line {number}: {error.message}", field=error.field, code=error.code) from None
    for measurement, key in read:
        store.add_measurement(measurement=measurement, idempotency_key=key)
    return len(read)


def _print(made: Sequence[MadeCalibration], *, stored: int, quiet: bool) -> None:
    from hp_tool.cli.tables import print_table, wide_console
    from hp_tool.units import counted

    console = wide_console(width=160)
    if stored:
        console.print(f"{counted(stored, 'measurement')} stored", highlight=False)
    if not made:
        if not quiet:
            console.print("no measurements to calibrate with: run `hp-tool tune`, or import some with --measurements FILE")
        return
    rows = [
        (
            each.record.cluster_key,
            each.record.framework,
            f"{each.record.model_family}: {', '.join(each.models)}",
            f"{each.record.version}{'' if each.new else ' (as before)'}",
            str(each.record.num_measurements),
            _percent(each.accuracy.error_before),
            _percent(each.accuracy.error_after),
        )
        for each in made
    ]
    heads = ("cluster", "software", "models", "version", "measurements", "before", "after")
    title = "median error of step time: the cost model alone, and calibrated on the other measurements"
    print_table(console, heads, rows, title=title, left=3)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def _benchmark(name: str, *, launcher: str | None, precisions: Sequence[str] | None) -> MachineReport:
    """Time the cluster's operations, check one training step, and store the profile for later estimates of this cluster."""
    from hp_tool import catalog
    from hp_tool.catalog.efficiency import save_machine_profile
    from hp_tool.learning import machine
    from hp_tool.tuning.clusters import check_profiled, cluster_launcher

    cluster = catalog.cluster(name)
    check_profiled(cluster.gpu)
    cpu = cluster.gpu.kind == "cpu"
    chosen = machine.checked_precisions(precisions or (("fp32",) if cpu else ("bf16",)), gpu=cluster.gpu)
    engine = cluster_launcher(name, name=launcher)
    typer.echo(f"timing operations on {cluster.num_gpus} x {cluster.gpu.name} ...", err=True)
    report, _ = machine.benchmark_machine(cluster=cluster, launcher=engine, precisions=chosen)
    typer.echo("one real training step ...", err=True)
    check = machine.check_step(cluster=cluster, launcher=engine, profile=report.profile, precision=chosen[0])
    path = save_machine_profile(cluster.name, report.profile)
    typer.echo(f"stored in {path}", err=True)
    return replace(report, check=check)


def _print_report(report: MachineReport) -> None:
    from hp_tool.cli.tables import print_table, wide_console

    console = wide_console(width=160)
    rows = [(fit, str(count), f"{error:.1%}") for fit, (count, error) in report.errors.items()]
    title = f"cluster {report.cluster}: measured efficiency, {report.wall_s:.0f} s"
    print_table(console, ("fit", "operations", "median error"), rows, title=title, left=1)
    for each in report.outliers:
        console.print(
            f"slow {each.kind}: {each.name} is {each.slowdown:.2f} times as slow as its peers ({each.operations} operations)",
            highlight=False,
            markup=False,
        )
    if not report.outliers:
        console.print("preflight: no node, device or link is slower than its peers")
    if (check := report.check) is not None:
        console.print(
            f"one training step ({check.what}): measured {check.measured_s * 1e3:.1f} ms; predicted "
            f"{check.before_s * 1e3:.1f} ms before ({check.before_s / check.measured_s - 1:+.1%}), "
            f"{check.after_s * 1e3:.1f} ms after ({check.after_s / check.measured_s - 1:+.1%})",
            highlight=False,
        )
