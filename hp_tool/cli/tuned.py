"""A tuned result as a table: predicted before, predicted after calibration and measured, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hp_tool.cli.serving import print_serving_misses, print_tuned_serving
from hp_tool.cli.tables import print_misses
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.render.words import arithmetic, configuration_cells
from hp_tool.tuning.result import TuneResult
from hp_tool.units import SECONDS_PER_HOUR, duration, gib

MAX_ROWS = 10
"""Rows beyond the measured ones are left out after this many."""


def print_result(result: TuneResult, *, front: bool = False) -> None:
    """The table, the best configuration by name, and what it cost to find. `front`: the Pareto set in place of the ranking."""
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    trained = [row for row in result.recommendations if isinstance(row, Recommendation)]
    served = [row for row in result.recommendations if isinstance(row, ServingRecommendation)]
    if result.error is not None:
        console.print(f"[red]{result.error['message']}[/red]")
    if served:
        print_tuned_serving(console, served)
    else:
        _print_trained(console, list(result.pareto) if front else trained, front=front)
    if trained:
        console.print(f"best: {arithmetic(trained[0].parallel)} ({_how(trained[0])})", style="bold", highlight=False)
    print_misses(console, [row for row in result.nearest_misses if isinstance(row, Recommendation)])
    print_serving_misses(console, [row for row in result.nearest_misses if isinstance(row, ServingRecommendation)])
    _print_account(console, result)


def _print_trained(console: Console, found: Sequence[Recommendation], *, front: bool) -> None:
    table = Table(title="step time: predicted before, after calibration, and measured")
    rows = list(found) if front else [row for row in found if row.measurement is not None or row.rank <= MAX_ROWS]
    heads, cells = configuration_cells([row.parallel for row in rows])
    for name in (
        "rank",
        *heads,
        "before",
        "after",
        "90 % interval",
        "measured",
        "tokens/s/GPU",
        *(["memory"] if front else []),
    ):
        table.add_column(name, justify="right")
    for row, configuration in zip(rows, cells, strict=True):
        memory = [_memory(row)] if front else []
        table.add_row(str(row.rank), *configuration, *_figures(row), *memory, style="bold" if row.rank == 1 else None)
    console.print(table)


def _print_account(console: Console, result: TuneResult) -> None:
    """What the search cost, and why it ended."""
    search = result.search
    grid = ""
    if search.grid_gpu_seconds:
        share = search.gpu_seconds / search.grid_gpu_seconds
        grid = f"; all {result.space.feasible:,} feasible ones would have taken {_device_time(search.grid_gpu_seconds)}"
        grid += f" ({share:.0%} of it was spent)"
    console.print(
        f"search {search.id} {search.state}: {search.profile_runs} profile runs, {_device_time(search.gpu_seconds)}"
        f"{grid}; stopped because: {search.stopped_because}",
        highlight=False,
    )
    if search.reduced_runs:
        told = f"{search.reduced_runs} of the runs were reduced; ~ marks a step time implied by one"
        console.print(told, highlight=False)
    if search.expected_gain_fraction is not None:
        console.print(f"left to win: another run is expected to save {search.expected_gain_fraction:.1%}", highlight=False)
    if search.state == "paused":
        console.print(f"go on with: hp-tool tune --resume {search.id}", highlight=False)


def _how(row: Recommendation) -> str:
    if row.measurement is None:
        return "predicted, not measured"
    return "measured" if row.measurement.fidelity.is_whole else "implied by a reduced run"


def _figures(row: Recommendation) -> list[str]:
    measured = row.measurement
    before, after = row.estimate.time, row.calibrated_estimate.time if row.calibrated_estimate else None
    intervals = row.calibrated_estimate.intervals if row.calibrated_estimate else None
    step_s = measured.objective_s if measured is not None else None
    whole = measured is not None and measured.fidelity.is_whole
    rate = measured.tokens_per_second_per_gpu if measured is not None and whole else None
    return [
        duration(before.step_s) if before else "-",
        duration(after.step_s) if after else "-",
        " to ".join(duration(end) for end in intervals.step_s) if intervals else "-",
        f"{'' if whole else '~'}{duration(step_s)}" if step_s is not None else "-",
        f"{rate:,.0f}" if rate is not None else "-",
    ]


def _memory(row: Recommendation) -> str:
    """Of the fullest device, after calibration."""
    after = row.calibrated_estimate.memory if row.calibrated_estimate else None
    return gib(after.total_bytes) if after else "-"


def _device_time(gpu_seconds: float) -> str:
    """Device seconds for people: seconds while few, then hours."""
    if gpu_seconds < SECONDS_PER_HOUR:
        return f"{gpu_seconds:,.0f} GPU-seconds"
    return f"{gpu_seconds / SECONDS_PER_HOUR:,.1f} GPU-hours"
