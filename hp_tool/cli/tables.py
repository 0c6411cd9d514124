"""Terminal tables of training results, and functions shared with serving and sizing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from hp_tool.cli.layout import make_console, print_columns
from hp_tool.domain.inference import RATE_PATH
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Goodput, Reason, Recommendation
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.domain.targets import Targets
from hp_tool.domain.units import (
    JOULES_PER_MWH,
    format_count,
    format_decimal,
    format_duration,
    format_gib,
    format_whole,
)
from hp_tool.questions.answers import RecommendAnswer
from hp_tool.questions.serving.problem import counts_by_rate
from hp_tool.wording import figures, rankings
from hp_tool.wording.columns import (
    Column,
    configuration_columns,
    counts,
    duration_column,
    figure_column,
    gibs,
    num_gpus_cells,
    parts_columns,
    terminal_columns,
    unmeasured_features,
    varied_columns,
    versus_first,
)
from hp_tool.wording.familiarity import familiarity_words, faster_words, measured_words
from hp_tool.wording.fit import (
    chosen_settings_words,
    memory_range_words,
    open_settings_sentences,
    out_of_memory_words,
    stall_words,
)
from hp_tool.wording.rejections import RULES
from hp_tool.wording.short import (
    layout_words,
    training_figures_words,
    training_totals_words,
    use_training_words,
)
from hp_tool.wording.words import layout_arithmetic, serving_arithmetic, unmeasured_words


def print_reasons(console: Console, reasons: Iterable[Reason], *, prefix: str = "") -> None:
    """Print the reasons why a configuration is infeasible, one per line."""
    for reason in reasons:
        console.print(f"{prefix}[red]{reason.code}[/red]: {reason.message}")


def print_memory_parts(console: Console, parts_bytes: Mapping[str, float]) -> None:
    """Print bytes by part."""
    print_columns(
        console,
        parts_columns(
            parts_bytes, Column(head="memory", unit="GiB", cells=gibs(parts_bytes.values()))
        ),
    )


def print_fixes(
    console: Console,
    columns: Sequence[Column],
    remaining: Mapping[str, Iterable[Reason]],
    *,
    title: str = "How to fix it",
) -> None:
    """Print the changes that fix an infeasible configuration, or the nearest misses with the
    reasons that remain.
    """
    if not remaining:
        console.print("no small change fixes this; `hp-tool recommend` ranks all configurations")
        return
    changes = Column(head="change", cells=tuple(remaining), left=True)
    print_columns(console, [changes, *columns], title=title)
    for change, reasons in remaining.items():
        print_reasons(console, reasons, prefix=f"{change} comes nearest, but ")


def print_space(console: Console, answer: RecommendAnswer) -> None:
    """Print the number of legal configurations and the number of feasible ones."""
    space = answer.space
    console.print(
        f"{space.feasible:,} of {space.legal + space.pruned:,} legal "
        f"configurations fit and meet the "
        f"constraints; ranked in {format_duration(space.seconds)}.",
        highlight=False,
    )


def print_groups(console: Console, rows: Sequence[ServingRecommendation]) -> None:
    """Print the number of layouts that are tied with rank 1."""
    alike = sum(row.group == 1 for row in rows)
    if alike > 1:
        console.print(f"Ranks 1 to {alike} are tied: the differences are within the model's error.")


def print_rejections(console: Console, answer: RecommendAnswer) -> None:
    """Print the number of candidates rejected by each rule. If no candidate remains, also print the
    requirement of the most frequent rule.
    """
    if answer.rejections:
        console.print(
            "rejected: "
            + ", ".join(f"{name} {count:,}" for name, count in answer.rejections.items())
        )
        if not answer.recommendations:
            most = max(answer.rejections, key=lambda name: answer.rejections[name])
            # Rankings of machines also count codes of queries that a machine cannot serve.
            if most in RULES:
                console.print(f"{most}: {RULES[most]}.")


def print_estimate(estimate: Estimate, *, calibrated: Estimate | None = None) -> None:
    """Print one configuration: memory and time by part and, if it is infeasible, the reasons and
    fixes.

    If `calibrated` is set, all metrics are taken from it, and one line shows the uncalibrated step
    time.
    """
    console = make_console()
    preferred = calibrated or estimate
    if estimate.parallel is not None:
        outcome = training_figures_words(preferred) if preferred.feasible else "not feasible"
        console.print(f"{layout_words(estimate.parallel)}: {outcome}.", highlight=False)
    if calibrated is not None:
        _print_calibrated(console, calibrated, alone=estimate)
    print_reasons(console, preferred.reasons)
    _print_costs(console, preferred)
    if not preferred.feasible and not estimate.feasible:
        fixes = estimate.fixes
        memory, step, change = figures.AFTER_FIX
        columns = [
            figure_column(memory, fixes),
            figure_column(figures.FIT, fixes, drop=1),
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
        title = "How to fix it" if calibrated is None else "How to fix it (without calibration)"
        print_fixes(console, columns, {fix.change: fix.remaining for fix in fixes}, title=title)


def _print_costs(console: Console, estimate: Estimate) -> None:
    if estimate.memory is None or estimate.time is None:
        return
    memory, time, intervals = estimate.memory, estimate.time, estimate.intervals
    short = memory.total_bytes - memory.capacity_bytes
    room = (
        f" of {format_gib(memory.capacity_bytes)}"
        if short <= 0
        else f", {format_gib(short)} more than the {format_gib(memory.capacity_bytes)}"
    )
    stage = "" if memory.worst_stage == 0 else f" (stage {memory.worst_stage}, the fullest)"
    console.print(f"Memory{stage}: {format_gib(memory.total_bytes)}{room} usable", style="bold")
    _print_fit(console, estimate)
    print_memory_parts(console, memory.parts_bytes)
    console.print("Step time", style="bold")
    parts = {name: seconds for name, seconds in time.parts_s.items() if seconds > 0.0}
    print_columns(console, parts_columns(parts, duration_column("exposed", list(parts.values()))))
    console.print(
        f"{estimate.model_tflops_per_gpu:.0f} model TFLOP/s per GPU, {_shares_of_peak(estimate)}",
        highlight=False,
    )
    if why := stall_words(estimate):
        console.print(f"The range is wide: {why}.", highlight=False)
    if intervals is not None:
        print_familiarity(console, estimate)
        _print_open_settings(console, estimate)
    print_unmeasured(console, [estimate])
    if estimate.days is not None:
        cost = f", ${estimate.cost:,.0f}" if estimate.cost is not None else ""
        energy = (
            f", {format_decimal(estimate.energy / JOULES_PER_MWH)} MWh"
            if estimate.energy is not None
            else ""
        )
        lost = (
            ""
            if estimate.effective_days is None
            else f" of training, {format_decimal(estimate.effective_days)} with failures"
        )
        console.print(
            f"{format_decimal(estimate.days)} days{lost}, "
            f"{format_whole(estimate.gpu_hours or 0.0)} "
            f"GPU-hours{cost}{energy}"
        )
    if estimate.goodput is not None:
        console.print(goodput_line(estimate.goodput))


def _print_fit(console: Console, estimate: Estimate) -> None:
    if estimate.fit is not None:
        console.print(
            f"{estimate.fit}: {out_of_memory_words(estimate)}; {memory_range_words(estimate)}",
            highlight=False,
        )


def _print_open_settings(console: Console, estimate: Estimate) -> None:
    for text in open_settings_sentences(estimate):
        console.print(text, highlight=False)


def _shares_of_peak(estimate: Estimate) -> str:
    """Return MFU and HFU with full attention and, if they differ, with the causal half of
    attention.
    """
    if estimate.mfu_causal is None or estimate.mfu_causal == estimate.mfu:
        return f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}"
    return (
        f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%} with attention counted in full; "
        f"MFU {estimate.mfu_causal:.1%}, HFU {estimate.hfu_causal:.1%} with its causal half"
    )


def print_familiarity(console: Console, estimate: Estimate | InferenceEstimate) -> None:
    """Print how similar the nearest measured runs are to the query."""
    if estimate.familiarity is not None:
        serves = isinstance(estimate, InferenceEstimate)
        sentence = familiarity_words(estimate.familiarity, serves=serves)
        console.print(f"{sentence}.", highlight=False)


def print_unmeasured(console: Console, estimates: Iterable[Estimate]) -> None:
    """Print the offload that a ranking chose, features that occur in no published run, and notes on
    recomputation and dynamic context parallelism.
    """
    estimates = list(estimates)
    assumed = [estimate.provenance.get("assumed") for estimate in estimates]
    offloads = dict.fromkeys(
        each["training.offload"]
        for each in assumed
        if isinstance(each, dict) and "training.offload" in each
    )
    for offload in offloads:
        console.print(
            f"Assumes training.offload: {offload}, because nothing fits without offload.",
            highlight=False,
        )
    names = dict.fromkeys(name for estimate in estimates for name in unmeasured_features(estimate))
    if names:
        validated_rank = next(
            (place for place, one in enumerate(estimates, start=1) if not unmeasured_features(one)),
            1,
        )
        first = f". Best validated layout: rank {validated_rank}" if validated_rank > 1 else ""
        console.print(f"* {unmeasured_words(names)}{first}", highlight=False)
    for key in ("recompute", "dynamic_context_parallel"):
        for sentence in dict.fromkeys(
            str(estimate.provenance[key]) for estimate in estimates if key in estimate.provenance
        ):
            console.print(sentence, highlight=False)


def _print_calibrated(console: Console, calibrated: Estimate, *, alone: Estimate) -> None:
    without = ""
    if alone.time is not None:
        without = f"; {format_duration(alone.time.step_s)} per step without"
        if calibrated.feasible and not alone.feasible:
            without += f" ({', '.join(reason.code for reason in alone.reasons)})"
    console.print(
        f"Calibrated by {_calibration_words(calibrated, version=True)}{without}.", highlight=False
    )
    print_measured(console, calibrated, name="This layout")


def print_measured(console: Console, estimate: Estimate, *, name: str) -> None:
    """Print the measured step time of a layout that ran on this cluster."""
    if text := measured_words(estimate):
        console.print(f"{name} ran on this cluster: {text}.", highlight=False)


def _calibration_words(calibrated: Estimate, *, version: bool = False) -> str:
    """Return `12 measurements on this cluster`. With `version`, include the version of the
    calibration.
    """
    calibration = calibrated.provenance["calibration"]
    assert isinstance(calibration, dict)
    suffix = f" (version {calibration['version']})" if version else ""
    return f"{format_count(calibration['measurements'], 'measurement')} on this cluster{suffix}"


def print_recommendations(answer: RecommendAnswer, *, top: int) -> None:
    """Print the recommended layout, the best rows, and settings that would narrow the interval or
    shorten the step.
    """
    console = make_console()
    ranked = [row for row in answer.recommendations if isinstance(row, Recommendation)][:top]
    estimates = [row.preferred_estimate for row in ranked]
    calibrated = next(
        (row.calibrated_estimate for row in ranked if row.calibrated_estimate is not None), None
    )
    for row in ranked[:1]:
        for text in (
            use_training_words(row),
            training_totals_words(row),
            chosen_settings_words(row.set),
        ):
            if text:
                console.print(text, highlight=False)
    if len(ranked) > 1:
        print_columns(console, _ranking_columns(ranked), bold_first=True)
    if estimates:
        print_familiarity(console, estimates[0])
    print_unmeasured(console, estimates)
    for row in ranked[:1]:
        if row.faster is not None:
            console.print(f"{faster_words(row.faster, than=row.parallel)}.", highlight=False)
    if answer.groups and answer.groups[0] > 1:
        console.print(
            f"{format_count(answer.groups[0] - 1, 'layout')} tied with rank 1: the differences are "
            "within the model's error.",
            highlight=False,
        )
    for best in estimates[:1]:
        _print_open_settings(console, best)
    if calibrated is not None:
        console.print(f"Calibrated by {_calibration_words(calibrated)}.", highlight=False)
    for rank, best in enumerate(estimates, start=1):
        print_measured(console, best, name=f"Rank {rank}")
    print_space(console, answer)
    print_nearest(console, answer.nearest_misses)
    if not ranked:
        print_rejections(console, answer)
    elif not answer.pareto and answer.sensitivity is None:
        console.print(
            "Next: `hp-tool recommend ... --json | hp-tool export -` writes the flags; "
            "`hp-tool tune ...` measures.",
            highlight=False,
            style="dim",
        )


def _ranking_columns(ranked: Sequence[Recommendation]) -> list[Column]:
    calibrated = any(row.calibrated_estimate is not None for row in ranked)
    before = [row.estimate for row in ranked if calibrated]
    num_gpus = Column(head="GPUs", cells=num_gpus_cells(ranked))
    settings = [
        *([num_gpus] if any("cluster.num_gpus" in row.set for row in ranked) else []),
        *configuration_columns([row.parallel for row in ranked]),
        *varied_columns(ranked),
    ]
    differing = [column for column in settings if not column.is_constant]
    return [
        *terminal_columns([rankings.RANK], ranked),
        *differing,
        *([figure_column(figures.STEP, before, head="uncalibrated", drop=3)] if before else []),
        *terminal_columns(rankings.TRAINING_FIGURES, ranked),
        *versus_first(ranked),
        *terminal_columns([rankings.RISK], ranked),
    ]


def print_nearest(
    console: Console, nearest: Iterable[object], *, query: Query | None = None
) -> None:
    """Print the nearest misses with their reasons. For serving, also print the highest possible
    load if `query` is passed.
    """
    for row in nearest:
        if isinstance(row, Recommendation):
            machine = "" if row.cluster is None else f"{row.cluster}: "
            console.print(f"nearest: {machine}{layout_arithmetic(row.parallel)}", highlight=False)
            print_reasons(console, row.preferred_estimate.reasons, prefix="  ")
        elif isinstance(row, ServingRecommendation):
            reasons = "; ".join(reason.message for reason in row.preferred_estimate.reasons)
            layout = serving_arithmetic(row.parallel, replicas=row.estimate.replicas)
            at = f" at {row.set[RATE_PATH]:g}/s" if RATE_PATH in row.set else ""
            line = f"nearest{at}: {layout}, engine limit {row.parallel.max_num_seqs}: {reasons}"
            if query is not None and row.estimate.highest_load is not None:
                line += f"; highest load: {highest_load_of(row.estimate, query)}"
            console.print(line, highlight=False)


def highest_load_of(estimate: InferenceEstimate, query: Query) -> str:
    """Return `4.629 requests/s within the targets`."""
    load, workload = estimate.highest_load or 0.0, query.inference
    per_second = workload is not None and counts_by_rate(workload)
    shown = (
        f"{load:,.4g} requests/s"
        if per_second
        else f"{format_count(int(load), 'request')} in flight"
    )
    return shown + (" within the targets" if any((query.targets or Targets()).limits()) else "")


def print_pareto(answer: RecommendAnswer) -> None:
    """Print the Pareto-optimal configurations, if the answer contains them."""
    if not answer.pareto:
        return
    estimates = [row.preferred_estimate for row in answer.pareto]
    num_gpus = Column(head="GPUs", cells=tuple(str(e.provenance["num_gpus"]) for e in estimates))
    tokens = Column(
        head="tokens", unit="/s", cells=counts(e.tokens_per_second for e in estimates), drop=3
    )
    columns = [
        num_gpus,
        *configuration_columns([row.parallel for row in answer.pareto]),
        *terminal_columns(rankings.TRAINING_FIGURES, estimates),
        tokens,
    ]
    print_columns(make_console(), columns, title="Pareto-optimal configurations", legend=False)


def goodput_line(goodput: Goodput) -> str:
    """Return one line with the goodput, the time between failures, the checkpoint time and the
    restart time.
    """
    return (
        f"goodput {goodput.fraction:.1%}: a failure every {format_duration(goodput.mtbf_s)}, "
        f"a checkpoint of {format_duration(goodput.checkpoint_s)} every "
        f"{format_duration(goodput.checkpoint_interval_s)}, "
        f"{format_duration(goodput.restart_s)} to restart"
    )


def print_sensitivity(sensitivity: Sensitivity) -> None:
    """Print step time, days and cost by number of GPUs, and the step time without each axis and on
    better hardware.
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
    print_columns(console, columns, title="effect of each change (- : nothing fits)")
    if (start := sensitivity.start) is not None:
        console.print(
            f"Compared with rank 1: {layout_words(start.parallel)}, "
            f"{format_duration(start.step_s)} per step.",
            highlight=False,
        )
