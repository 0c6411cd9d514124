"""Results of training as tables for people, in human units, and what they share with those of
serving and sizing.
"""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from hp_tool.cli.layout import make_console, print_columns
from hp_tool.domain.inference import RATE
from hp_tool.domain.result import Estimate, Goodput, Reason, Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.domain.units import JOULES_PER_MWH, counted, decimal, duration, gib, whole
from hp_tool.questions.answers import RecommendAnswer
from hp_tool.wording import figures
from hp_tool.wording.columns import (
    Column,
    choice_columns,
    configuration_columns,
    counts,
    duration_column,
    duration_unit,
    figure_column,
    fit_column,
    gibs,
    listed_columns,
    num_gpus_cells,
    parts_columns,
    scaled,
    training_figures,
    unchecked,
)
from hp_tool.wording.fit import chance, left_open, needs, taken, why_wide
from hp_tool.wording.words import arithmetic, serving_arithmetic, unchecked_words


def print_reasons(console: Console, reasons: Iterable[Reason], *, prefix: str = "") -> None:
    """Why a configuration is infeasible, a line each."""
    for reason in reasons:
        console.print(f"{prefix}[red]{reason.code}[/red]: {reason.message}")


def print_memory_parts(console: Console, parts_bytes: Mapping[str, float]) -> None:
    """Bytes by part."""
    print_columns(
        console,
        parts_columns(
            parts_bytes, Column(head="memory", unit="GiB", cells=gibs(parts_bytes.values()))
        ),
    )


def print_fixes(
    console: Console, columns: Sequence[Column], remaining: Mapping[str, Iterable[Reason]]
) -> None:
    """The changes that fix an infeasible configuration, and for those that come nearest the reasons
    that remain.
    """
    if not remaining:
        console.print("no small change fixes it; `hp-tool recommend` ranks the whole space")
        return
    changes = Column(head="change", cells=tuple(remaining), left=True)
    print_columns(console, [changes, *columns], title="How to fix it")
    for change, reasons in remaining.items():
        print_reasons(console, reasons, prefix=f"{change} comes nearest, but ")


def print_space(console: Console, answer: RecommendAnswer) -> None:
    """How many configurations there were, and how many each rule rejected."""
    s = answer.space
    pruned = f", {s.pruned:,} more ruled out by bounds" if s.pruned else ""
    console.print(
        f"{s.legal:,} legal configurations{pruned}, {s.feasible:,} of them acceptable, ranked in "
        f"{duration(s.seconds)}"
    )
    if answer.groups:
        others = "".join(
            f", group {number} has {size:,}"
            for number, size in enumerate(answer.groups[1:], start=2)
        )
        console.print(
            f"group 1 has {counted(answer.groups[0], 'layout')} that the model cannot tell "
            f"apart{others}"
        )


def print_groups(console: Console, rows: Sequence[ServingRecommendation]) -> None:
    """How far the best can be told apart from the next."""
    alike = sum(row.group == 1 for row in rows)
    if alike > 1:
        console.print(
            f"ranks 1 to {alike} cannot be told apart: measure them, or take the simplest"
        )


def print_rejections(console: Console, answer: RecommendAnswer) -> None:
    """How many candidates each rule ruled out."""
    if answer.rejections:
        console.print(
            "rejected: "
            + ", ".join(f"{name} {count:,}" for name, count in answer.rejections.items())
        )


def print_estimate(estimate: Estimate, *, calibrated: Estimate | None = None) -> None:
    """One configuration: memory and time by part, the calibrated prediction, and why it is
    infeasible with how to fix it.
    """
    console = make_console()
    if estimate.parallel is not None:
        console.print(arithmetic(estimate.parallel))
    print_reasons(console, estimate.reasons)
    _print_costs(console, estimate)
    if calibrated is not None:
        _print_calibrated(console, calibrated)
    if not estimate.feasible:
        fixes = estimate.fixes
        memory, step, change = figures.AFTER_FIX
        columns = [
            figure_column(memory, fixes),
            fit_column(fixes),
            Column(
                head="saved",
                unit="GiB",
                cells=gibs(fix.memory_saved_bytes for fix in fixes),
                drop=2,
            ),
            figure_column(step, fixes),
            figure_column(change, fixes, drop=1),
        ]
        if any(fix.days is not None for fix in fixes):
            columns.append(figure_column(figures.DAYS, fixes, drop=3))
        print_fixes(console, columns, {fix.change: fix.remaining for fix in fixes})


def _print_costs(console: Console, estimate: Estimate) -> None:
    if estimate.memory is None or estimate.time is None:
        return
    memory, time, intervals = estimate.memory, estimate.time, estimate.intervals
    short = memory.total_bytes - memory.capacity_bytes
    room = (
        f" of {gib(memory.capacity_bytes)}"
        if short <= 0
        else f", {gib(short)} more than the {gib(memory.capacity_bytes)}"
    )
    console.print(
        f"memory on stage {memory.worst_stage}, the fullest: {gib(memory.total_bytes)}{room} usable"
    )
    _print_fit(console, estimate)
    print_memory_parts(console, memory.parts_bytes)
    console.print(f"step time: {duration(time.step_s)}")
    parts = {name: seconds for name, seconds in time.parts_s.items() if seconds > 0.0}
    print_columns(console, parts_columns(parts, duration_column("exposed", list(parts.values()))))
    console.print(
        f"{estimate.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
        f"{estimate.model_tflops_per_gpu:.0f} model TFLOP/s/GPU, "
        f"{_shares_of_peak(estimate)}"
    )
    if intervals is not None:
        low, high = intervals.step_s
        between = (
            f"step time between {duration(low)} and {duration(high)} with "
            f"{intervals.confidence:.0%} confidence"
        )
        console.print(f"{between}{_wide(estimate)}")
        _print_left_open(console, estimate)
    print_unchecked(console, [estimate])
    if estimate.days is not None:
        cost = f", ${estimate.cost:,.0f}" if estimate.cost is not None else ""
        energy = (
            f", {decimal(estimate.energy / JOULES_PER_MWH)} MWh"
            if estimate.energy is not None
            else ""
        )
        lost = (
            ""
            if estimate.effective_days is None
            else f" of training, {decimal(estimate.effective_days)} with failures"
        )
        console.print(
            f"{decimal(estimate.days)} days{lost}, {whole(estimate.gpu_hours or 0.0)} "
            f"GPU-hours{cost}{energy}"
        )
    if estimate.goodput is not None:
        console.print(goodput_line(estimate.goodput))


def _print_fit(console: Console, estimate: Estimate) -> None:
    """Whether it fits: the word, its chance, and the interval that this comes from."""
    if estimate.fit is not None:
        console.print(f"{estimate.fit}: {chance(estimate)}; {needs(estimate)}", highlight=False)


def _print_left_open(console: Console, estimate: Estimate) -> None:
    """What the query leaves open, and what naming it would give."""
    for text in left_open(estimate):
        console.print(text, highlight=False)


def _shares_of_peak(estimate: Estimate) -> str:
    """`MFU 50.4 % (attention in full; 46.0 % ...)`: the convention with each share, and what full
    scores overstate.
    """
    if estimate.mfu_causal is None or estimate.mfu_causal == estimate.mfu:
        return f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}"
    return (
        f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%} with attention counted in full; "
        f"MFU {estimate.mfu_causal:.1%}, HFU {estimate.hfu_causal:.1%} with its causal half"
    )


def print_unchecked(console: Console, estimates: Iterable[Estimate]) -> None:
    """Print what is offloaded unasked, what no published run covers, and recomputation that frees
    nothing.
    """
    estimates = list(estimates)
    assumed = [estimate.provenance.get("assumed") for estimate in estimates]
    offloads = dict.fromkeys(
        each["training.offload"]
        for each in assumed
        if isinstance(each, dict) and "training.offload" in each
    )
    for offload in offloads:
        console.print(f"these use training.offload: {offload}", highlight=False)
    names = dict.fromkeys(name for estimate in estimates for name in unchecked(estimate))
    if names:
        checked = next(
            (place for place, one in enumerate(estimates, start=1) if not unchecked(one)), 1
        )
        first = f"; the best without is number {checked} here" if checked > 1 else ""
        console.print(f"* {unchecked_words(names)}{first}", highlight=False)
    for key in ("recompute", "dynamic_context_parallel"):
        for sentence in dict.fromkeys(
            str(each.provenance[key]) for each in estimates if key in each.provenance
        ):
            console.print(sentence, highlight=False)


def _wide(estimate: Estimate) -> str:
    return f" ({why})" if (why := why_wide(estimate)) else ""


def _print_calibrated(console: Console, calibrated: Estimate) -> None:
    if calibrated.time is None or calibrated.memory is None or calibrated.intervals is None:
        return
    low, high = calibrated.intervals.step_s
    console.print(f"calibrated by {_calibration(calibrated, version=True)}:", style="bold")
    console.print(
        f"step time {duration(calibrated.time.step_s)}, between {duration(low)} and "
        f"{duration(high)} with "
        f"{calibrated.intervals.confidence:.0%} confidence{_wide(calibrated)}; "
        f"{calibrated.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    )
    console.print(
        f"memory {gib(calibrated.memory.total_bytes)} of {gib(calibrated.memory.capacity_bytes)} "
        "usable"
    )
    _print_fit(console, calibrated)
    print_reasons(console, calibrated.reasons)


def _calibration(calibrated: Estimate, *, version: bool = False) -> str:
    """`12 measurements on this cluster`, from which the calibration was made, with its version if
    wanted.
    """
    calibration = calibrated.provenance["calibration"]
    assert isinstance(calibration, dict)
    suffix = f" (version {calibration['version']})" if version else ""
    return f"{counted(calibration['measurements'], 'measurement')} on this cluster{suffix}"


def print_recommendations(answer: RecommendAnswer) -> None:
    """The ranked configurations, and how many each rule rejected."""
    console = make_console()
    ranked = [row for row in answer.recommendations if isinstance(row, Recommendation)]
    calibrated = next(
        (row.calibrated_estimate for row in ranked if row.calibrated_estimate is not None), None
    )
    estimates = [row.known for row in ranked]
    shown = training_figures(estimates)
    if calibrated is not None:
        unit, size = duration_unit(e.time.step_s for e in estimates if e.time is not None)
        before = [
            row.estimate.time.step_s if row.estimate.time is not None else None for row in ranked
        ]
        shown.insert(0, Column(head="before", unit=unit, cells=scaled(before, size), drop=3))
    if ranked:
        num_gpus = Column(head="GPUs", cells=num_gpus_cells(ranked))
        columns = [
            rank_column(ranked),
            *([num_gpus] if any("cluster.num_gpus" in row.set for row in ranked) else []),
            *configuration_columns([row.parallel for row in ranked]),
            *listed_columns(ranked),
            *shown,
            *choice_columns(ranked),
        ]
        print_columns(console, columns, title="best configurations by the cost model")
    print_unchecked(console, estimates)
    for row in ranked[:1]:
        if text := taken(row.set):
            console.print(text, highlight=False)
        if text := _whole_training(row):
            console.print(text, highlight=False)
    for best in estimates[:1]:
        _print_left_open(console, best)
    print_space(console, answer)
    if calibrated is not None:
        console.print(f"ranked after {_calibration(calibrated)}; before: the cost model alone")
    print_nearest(console, answer.nearest_misses)
    print_rejections(console, answer)


def _whole_training(row: Recommendation) -> str:
    """`rank 1 trains for 1.8 days (1.5 to 2.1), $18,966 ($15,985 to $22,502), and ends in time with
    97 % probability`.
    """
    if row.days_interval is None:
        return ""
    days = row.known.calendar_days or 0.0
    text = (
        f"rank 1 trains for {decimal(days)} days ({' to '.join(map(decimal, row.days_interval))})"
    )
    if row.cost is not None and row.cost_interval is not None:
        text += f", ${row.cost:,.0f} ({' to '.join(f'${end:,.0f}' for end in row.cost_interval)})"
    if row.deadline_probability is not None:
        chance = row.deadline_probability
        text += (
            f", and ends in time with {'over 99%' if chance > 0.995 else f'{chance:.0%}'} "
            "probability"
        )
    return text


def rank_column(rows: Sequence[Recommendation | ServingRecommendation]) -> Column:
    """Ranks, the first column."""
    return Column(head="rank", cells=tuple(str(row.rank) for row in rows))


def print_nearest(console: Console, nearest: Iterable[object]) -> None:
    """If no configuration is acceptable: those that come nearest, and what each of them lacks."""
    for row in nearest:
        if isinstance(row, Recommendation):
            machine = "" if row.cluster is None else f"{row.cluster}: "
            console.print(f"nearest: {machine}{arithmetic(row.parallel)}", highlight=False)
            print_reasons(console, row.known.reasons, prefix="  ")
        elif isinstance(row, ServingRecommendation):
            reasons = "; ".join(reason.message for reason in row.known.reasons)
            layout = serving_arithmetic(row.parallel, replicas=row.estimate.replicas)
            at = f" at {row.set[RATE]:g}/s" if RATE in row.set else ""
            line = f"nearest{at}: {layout}, engine limit {row.parallel.max_num_seqs}: {reasons}"
            bearable = row.estimate.highest_load
            console.print(
                line + ("" if bearable is None else f"; it bears a load of {bearable:,.4g}"),
                highlight=False,
            )


def print_pareto(answer: RecommendAnswer) -> None:
    """The Pareto-optimal configurations, if the answer has them."""
    if not answer.pareto:
        return
    estimates = [row.known for row in answer.pareto]
    devices = Column(head="GPUs", cells=tuple(str(e.provenance["num_gpus"]) for e in estimates))
    whole = Column(
        head="tokens", unit="/s", cells=counts(e.tokens_per_second for e in estimates), drop=3
    )
    columns = [
        devices,
        *configuration_columns([row.parallel for row in answer.pareto]),
        *training_figures(estimates),
        whole,
    ]
    print_columns(make_console(), columns, title="Pareto-optimal configurations", legend=False)


def goodput_line(goodput: Goodput) -> str:
    """The share of the calendar time that is training, and where it comes from, on one line."""
    return (
        f"goodput {goodput.fraction:.1%}: a failure every {duration(goodput.mtbf_s)}, "
        f"a checkpoint of {duration(goodput.checkpoint_s)} every "
        f"{duration(goodput.checkpoint_interval_s)}, "
        f"{duration(goodput.restart_s)} to restart"
    )
