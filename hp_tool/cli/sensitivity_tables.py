"""What a recommendation depends on, as tables."""

from hp_tool.cli.layout import make_console, print_columns
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.wording.columns import ABSENT, Column, configuration_columns, duration_column


def print_sensitivity(sensitivity: Sensitivity) -> None:
    """Step time, days and cost over numbers of devices; the price of each axis left out, and the
    gain of better hardware.
    """
    console = make_console()
    points = sensitivity.scaling
    if points:
        columns = [
            Column(head="GPUs", cells=tuple(f"{point.num_gpus:,}" for point in points)),
            duration_column("step", [point.step_s for point in points]),
            Column(
                head="days",
                cells=tuple(
                    ABSENT if point.days is None else f"{point.days:.1f}" for point in points
                ),
                drop=1,
            ),
            Column(
                head="cost",
                unit="$",
                cells=tuple(
                    ABSENT if point.cost is None else f"{point.cost:,.0f}" for point in points
                ),
                drop=1,
            ),
            *configuration_columns([point.parallel for point in points]),
        ]
        print_columns(console, columns, title="fastest configuration by number of GPUs")
        fewest, most = sensitivity.fewest_gpus_near_cheapest, sensitivity.fastest_gpus_near_cheapest
        console.print(f"within 5% of the lowest cost: {fewest:,} to {most:,} GPUs")
    changes = (*sensitivity.axes, *sensitivity.hardware)
    fractions = [one.change_fraction for one in changes]
    columns = [
        Column(head="change", cells=tuple(one.change for one in changes), left=True),
        duration_column("step", [one.step_s for one in changes]),
        Column(
            head="longer",
            unit="%",
            cells=tuple(ABSENT if one is None else f"{100.0 * one:+.1f}" for one in fractions),
        ),
    ]
    print_columns(console, columns, title="what it depends on (- : nothing fits)")
