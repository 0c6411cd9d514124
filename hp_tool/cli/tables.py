"""Results as tables for people; numbers in human units, one line of talk at most."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hp_tool.answers import RecommendAnswer
from hp_tool.domain.result import Estimate, Goodput, Mend, Recommendation
from hp_tool.render.words import arithmetic, configuration_cells
from hp_tool.units import JOULES_PER_MWH, counted, duration, gib


def print_estimate(estimate: Estimate, *, calibrated: Estimate | None = None) -> None:
    """One configuration: its verdict, memory by part, time by part; and what measurements on its cluster make of it."""
    console = wide_console()
    if estimate.parallel is not None:
        console.print(arithmetic(estimate.parallel))
    for reason in estimate.reasons:
        console.print(f"[red]{reason.code}[/red]: {reason.message}")
    _print_costs(console, estimate)
    if calibrated is not None:
        _print_calibrated(console, calibrated)
    if not estimate.feasible:
        _print_mends(console, estimate.mends)


def _print_costs(console: Console, estimate: Estimate) -> None:
    if estimate.memory is None or estimate.time is None:
        return
    memory, time = estimate.memory, estimate.time
    console.print(
        f"memory on stage {memory.worst_stage}, the fullest: {gib(memory.total_bytes)} of {gib(memory.capacity_bytes)}"
    )
    table = Table()
    table.add_column("part")
    table.add_column("size", justify="right")
    for name, size in memory.parts_bytes.items():
        table.add_row(name, gib(size))
    console.print(table)
    console.print(f"step time: {duration(time.step_s)}")
    table = Table()
    table.add_column("part")
    table.add_column("exposed", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in time.parts_s.items():
        if seconds > 0.0:
            table.add_row(name.replace("_", " "), duration(seconds), f"{seconds / time.step_s:.1%}")
    console.print(table)
    console.print(
        f"{estimate.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, {estimate.model_tflops_per_gpu:.0f} model TFLOP/s/GPU, "
        f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}"
    )
    if estimate.intervals is not None:
        low, high = estimate.intervals.step_s
        console.print(
            f"step time between {duration(low)} and {duration(high)} with {estimate.intervals.confidence:.0%} confidence"
        )
    if estimate.days is not None:
        cost = f", ${estimate.cost:,.0f}" if estimate.cost is not None else ""
        energy = f", {estimate.energy / JOULES_PER_MWH:,.1f} MWh" if estimate.energy is not None else ""
        lost = "" if estimate.effective_days is None else f" of training, {estimate.effective_days:.1f} with failures"
        console.print(f"{estimate.days:.1f} days{lost}, {estimate.gpu_hours:,.0f} GPU-hours{cost}{energy}")
    if estimate.goodput is not None:
        console.print(goodput_line(estimate.goodput))


def _print_calibrated(console: Console, calibrated: Estimate) -> None:
    """In three lines: which calibration, what it makes of time, and of memory."""
    if calibrated.time is None or calibrated.memory is None or calibrated.intervals is None:
        return
    known = calibrated.provenance["calibration"]
    assert isinstance(known, dict)
    low, high = calibrated.intervals.step_s
    source = f"{counted(known['measurements'], 'measurement')} on this cluster (version {known['version']})"
    console.print(f"calibrated by {source}:", style="bold")
    console.print(
        f"step time {duration(calibrated.time.step_s)}, between {duration(low)} and {duration(high)} with "
        f"{calibrated.intervals.confidence:.0%} confidence; {calibrated.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    )
    memory = calibrated.memory
    console.print(f"memory {gib(memory.total_bytes)} of {gib(memory.capacity_bytes)}")
    for reason in calibrated.reasons:
        console.print(f"[red]{reason.code}[/red]: {reason.message}")


def _print_mends(console: Console, mends: tuple[Mend, ...]) -> None:
    if not mends:
        console.print("no small change mends it; `hp-tool recommend` ranks the whole space")
        return
    table = Table(title="what would mend it")
    table.add_column("change")
    for name in ("memory", "saved", "step", "step change", "days"):
        table.add_column(name, justify="right")
    for mend in mends:
        table.add_row(
            mend.change,
            gib(mend.memory_total_bytes),
            "-" if mend.memory_saved_bytes is None else gib(mend.memory_saved_bytes),
            duration(mend.step_s),
            "-" if mend.step_change_fraction is None else f"{mend.step_change_fraction:+.1%}",
            "-" if mend.days is None else f"{mend.days:.1f}",
        )
    console.print(table)
    for mend in mends:
        for reason in mend.remaining:
            console.print(f"{mend.change} is the best near it, yet [red]{reason.code}[/red]: {reason.message}")


def print_recommendations(answer: RecommendAnswer) -> None:
    """The ranked configurations, and how many were turned away by which rule."""
    console = wide_console()
    table = Table(title="best configurations by the cost model")
    rows = [row for row in answer.recommendations if isinstance(row, Recommendation)]
    heads, cells = configuration_cells([row.parallel for row in rows])
    learnt = any(row.calibrated_estimate is not None for row in rows)
    for name in ("rank", *heads, *(("before",) if learnt else ()), "step", "MFU", "memory", "days"):
        table.add_column(name, justify="right")
    for row, configuration in zip(rows, cells, strict=True):
        e = row.calibrated_estimate or row.estimate
        before = (duration(row.estimate.time.step_s),) if learnt and row.estimate.time is not None else ()
        assert e.time is not None and e.memory is not None and e.mfu is not None
        days = f"{e.calendar_days:.1f}" if e.calendar_days is not None else "-"
        figures = (*before, duration(e.time.step_s), f"{e.mfu:.1%}", gib(e.memory.total_bytes), days)
        table.add_row(str(row.rank), *configuration, *figures)
    console.print(table)
    space = answer.space
    console.print(
        f"{space.legal:,} legal configurations, {space.feasible:,} of them acceptable, ranked in {duration(space.seconds)}"
    )
    if learnt and rows[0].calibrated_estimate is not None:
        known = rows[0].calibrated_estimate.provenance["calibration"]
        assert isinstance(known, dict)
        console.print(
            f"ranked after {counted(known['measurements'], 'measurement')} on this cluster; before: the cost model alone"
        )
    print_misses(console, answer.nearest_misses)
    if answer.rejections:
        console.print("turned away: " + ", ".join(f"{name} {count:,}" for name, count in answer.rejections.items()))


def print_misses(console: Console, misses: Sequence[Recommendation]) -> None:
    """What came nearest where nothing is acceptable, and what each lacks by the best that is known of it."""
    for miss in misses:
        console.print(f"nearest: {arithmetic(miss.parallel)}")
        for reason in (miss.calibrated_estimate or miss.estimate).reasons:
            console.print(f"  [red]{reason.code}[/red]: {reason.message}")


def print_front(answer: RecommendAnswer) -> None:
    """The Pareto set, where one was asked for."""
    if answer.pareto is None:
        return
    table = Table(title="what no other configuration beats in both")
    heads, cells = configuration_cells([row.parallel for row in answer.pareto])
    for name in ("GPUs", *heads, "step", "tokens/s", "memory", "days"):
        table.add_column(name, justify="right")
    for row, configuration in zip(answer.pareto, cells, strict=True):
        e = row.calibrated_estimate or row.estimate
        assert e.time is not None and e.memory is not None
        days = f"{e.calendar_days:.1f}" if e.calendar_days is not None else "-"
        figures = (duration(e.time.step_s), f"{e.tokens_per_second:,.0f}", gib(e.memory.total_bytes), days)
        table.add_row(str(e.provenance["num_gpus"]), *configuration, *figures)
    wide_console().print(table)


def goodput_line(kept: Goodput) -> str:
    """Share of the calendar that is training, and what it follows from, on one line."""
    return (
        f"goodput {kept.fraction:.1%}: a failure every {duration(kept.mtbf_s)}, a checkpoint of {duration(kept.checkpoint_s)} "
        f"every {duration(kept.checkpoint_interval_s)}, {duration(kept.restart_s)} to restart"
    )


def wide_console() -> Console:
    """Standard output; wide enough for the tables where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
