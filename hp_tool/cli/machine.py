"""`hp-tool calibrate --cluster NAME`: micro-benchmarks of a cluster, and a preflight of its devices and links."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hp_tool.learning.machine import MachineReport


def measure(name: str, *, launcher: str | None, precisions: Sequence[str] | None) -> MachineReport:
    """Time the cluster, check one training step, and keep the profile for every later estimate of this cluster."""
    from hp_tool import catalog
    from hp_tool.catalog.efficiency import save_machine_profile
    from hp_tool.learning import machine
    from hp_tool.tuning.clusters import cluster_launcher

    cluster = catalog.cluster(name)
    cpu = cluster.gpu.kind == "cpu"
    chosen = machine.checked_precisions(precisions or (("fp32",) if cpu else ("bf16",)), gpu=cluster.gpu)
    engine = cluster_launcher(name, name=launcher)
    typer.echo(f"timing operations on {cluster.num_gpus} x {cluster.gpu.name} ...", err=True)
    report, _ = machine.benchmark_machine(cluster=cluster, launcher=engine, precisions=chosen)
    typer.echo("one real training step ...", err=True)
    check = machine.check_step(cluster=cluster, launcher=engine, profile=report.profile, precision=chosen[0])
    path = save_machine_profile(cluster.name, report.profile)
    typer.echo(f"kept in {path}", err=True)
    return dataclasses.replace(report, check=check)


def show(report: MachineReport) -> None:
    """The report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    table = Table(title=f"cluster {report.cluster}: what its operations reach, {report.wall_s:.0f} s")
    for column in ("fit", "operations", "median error"):
        table.add_column(column, justify="left" if column == "fit" else "right")
    for what, (count, error) in report.errors.items():
        table.add_row(what, str(count), f"{error:.1%}")
    console.print(table)
    for each in report.outliers:
        console.print(
            f"slow {each.kind}: {each.name} takes {each.slowdown:.2f} times its peers' seconds ({each.operations} operations)",
            highlight=False,
            markup=False,
        )
    if not report.outliers:
        console.print("preflight: no node, device or link lags behind its peers")
    if (check := report.check) is not None:
        console.print(
            f"one training step ({check.what}): measured {check.measured_s * 1e3:.1f} ms; predicted "
            f"{check.before_s * 1e3:.1f} ms before ({check.before_s / check.measured_s - 1:+.1%}), "
            f"{check.after_s * 1e3:.1f} ms after ({check.after_s / check.measured_s - 1:+.1%})",
            highlight=False,
        )
