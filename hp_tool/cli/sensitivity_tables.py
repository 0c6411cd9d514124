"""Sensitivity of a recommendation as tables."""

from dataclasses import replace

from hp_tool.cli.layout import make_console, print_columns
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.domain.units import format_duration
from hp_tool.wording import figures
from hp_tool.wording.columns import Column, configuration_columns, figure_column
from hp_tool.wording.short import layout_words


def print_sensitivity(sensitivity: Sensitivity) -> None:
    """Print step time, days and cost by number of devices, the effect of leaving out each axis, and
    the gain from better hardware.
    """
    console = make_console()
    points = sensitivity.scaling
    _, step, change = figures.AFTER_FIX
    if points:
        columns = [
            Column(head="GPUs", cells=tuple(f"{point.num_gpus:,}" for point in points)),
            figure_column(step, points),
            figure_column(figures.DAYS, points, drop=1),
            figure_column(figures.COST, points, drop=1),
            *configuration_columns([point.parallel for point in points]),
        ]
        print_columns(console, columns, title="rank 1 by number of GPUs")
        fewest, most = sensitivity.fewest_gpus_near_cheapest, sensitivity.fastest_gpus_near_cheapest
        console.print(f"within 5% of the lowest cost: {fewest:,} to {most:,} GPUs")
    changes = (*sensitivity.axes, *sensitivity.hardware)
    columns = [
        Column(head="change", cells=tuple(one.change for one in changes), left=True),
        figure_column(step, changes),
        figure_column(replace(change, path="change_fraction"), changes),
    ]
    print_columns(console, columns, title="what it depends on (- : nothing fits)")
    if (start := sensitivity.start) is not None:
        console.print(
            f"Compared with rank 1: {layout_words(start.parallel)}, "
            f"{format_duration(start.step_s)} per step.",
            highlight=False,
        )
