"""Results of training, serving and sizing as tables for people, in human units."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from hp_tool.answers import RecommendAnswer
from hp_tool.domain.result import Estimate, Goodput, Reason, Recommendation
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.domain.serving import InferenceEstimate, PoolRecommendation, ServingRecommendation
from hp_tool.domain.sizing import Choice, Sizing
from hp_tool.render.words import arithmetic, configuration_cells, pool_sizes, serving_arithmetic
from hp_tool.units import JOULES_PER_MWH, counted, duration, gib


def wide_console(*, width: int = 140) -> Console:
    """Standard output; if it is a file or a pipe, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    left: int = 0,
    bold_first: bool = False,
) -> None:
    """A table whose first `left` columns are aligned left, and the others right."""
    table = Table(title=title)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right")
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if bold_first and number == 0 else None)
    console.print(table)


def print_reasons(console: Console, reasons: Iterable[Reason], *, prefix: str = "") -> None:
    """Why a configuration is infeasible, a line each."""
    for reason in reasons:
        console.print(f"{prefix}[red]{reason.code}[/red]: {reason.message}")


def _print_parts(console: Console, parts_bytes: Mapping[str, float]) -> None:
    rows = [(name.replace("_", " "), gib(size)) for name, size in parts_bytes.items()]
    print_table(console, ("part", "size"), rows, left=1)


def _print_fixes(
    console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], remaining: Mapping[str, Iterable[Reason]]
) -> None:
    """The changes that fix an infeasible configuration, and for those that come nearest the reasons that remain."""
    if not remaining:
        console.print("no small change fixes it; `hp-tool recommend` ranks the whole space")
        return
    print_table(console, ("change", *heads), rows, title="How to fix it", left=1)
    for change, reasons in remaining.items():
        print_reasons(console, reasons, prefix=f"{change} comes nearest, but ")


def _print_space(console: Console, answer: RecommendAnswer) -> None:
    s = answer.space
    pruned = f", {s.pruned:,} more ruled out by bounds" if s.pruned else ""
    console.print(
        f"{s.legal:,} legal configurations{pruned}, {s.feasible:,} of them acceptable, ranked in {duration(s.seconds)}"
    )


def _print_groups(console: Console, groups: Sequence[int]) -> None:
    """How many layouts cannot be told apart from the best, and how many from the next."""
    if groups:
        others = "".join(f", group {number} has {size:,}" for number, size in enumerate(groups[1:], start=2))
        console.print(f"group 1 has {counted(groups[0], 'layout')} that the model cannot tell apart{others}")


def _print_alike(console: Console, rows: Sequence[ServingRecommendation]) -> None:
    """How far the best can be told apart from the next."""
    alike = sum(row.group == 1 for row in rows)
    if alike > 1:
        console.print(f"ranks 1 to {alike} cannot be told apart: measure them, or take the simplest")


def _print_rejections(console: Console, answer: RecommendAnswer) -> None:
    if answer.rejections:
        console.print("rejected: " + ", ".join(f"{name} {count:,}" for name, count in answer.rejections.items()))


def print_estimate(estimate: Estimate, *, calibrated: Estimate | None = None) -> None:
    """One configuration: memory and time by part, the calibrated prediction, and why it is infeasible with how to fix it."""
    console = wide_console()
    if estimate.parallel is not None:
        console.print(arithmetic(estimate.parallel))
    print_reasons(console, estimate.reasons)
    _print_costs(console, estimate)
    if calibrated is not None:
        _print_calibrated(console, calibrated)
    if not estimate.feasible:
        rows = [
            (
                fix.change,
                gib(fix.memory_total_bytes),
                "-" if fix.memory_saved_bytes is None else gib(fix.memory_saved_bytes),
                duration(fix.step_s),
                "-" if fix.step_change_fraction is None else f"{fix.step_change_fraction:+.1%}",
                _days(fix.days),
            )
            for fix in estimate.mends
        ]
        heads = ("memory", "saved", "step", "step change", "days")
        _print_fixes(console, heads, rows, {fix.change: fix.remaining for fix in estimate.mends})


def _print_costs(console: Console, estimate: Estimate) -> None:
    if estimate.memory is None or estimate.time is None:
        return
    memory, time = estimate.memory, estimate.time
    console.print(
        f"memory on stage {memory.worst_stage}, the fullest: {gib(memory.total_bytes)} of {gib(memory.capacity_bytes)}"
    )
    _print_parts(console, memory.parts_bytes)
    console.print(f"step time: {duration(time.step_s)}")
    rows = [
        (name.replace("_", " "), duration(seconds), f"{seconds / time.step_s:.1%}")
        for name, seconds in time.parts_s.items()
        if seconds > 0.0
    ]
    print_table(console, ("part", "exposed", "share"), rows, left=1)
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
        console.print(_goodput_line(estimate.goodput))


def _print_calibrated(console: Console, calibrated: Estimate) -> None:
    if calibrated.time is None or calibrated.memory is None or calibrated.intervals is None:
        return
    low, high = calibrated.intervals.step_s
    console.print(f"calibrated by {_calibration(calibrated, version=True)}:", style="bold")
    console.print(
        f"step time {duration(calibrated.time.step_s)}, between {duration(low)} and {duration(high)} with "
        f"{calibrated.intervals.confidence:.0%} confidence; {calibrated.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    )
    console.print(f"memory {gib(calibrated.memory.total_bytes)} of {gib(calibrated.memory.capacity_bytes)}")
    print_reasons(console, calibrated.reasons)


def _calibration(calibrated: Estimate, *, version: bool = False) -> str:
    """`12 measurements on this cluster`, from which the calibration was made, with its version if wanted."""
    calibration = calibrated.provenance["calibration"]
    assert isinstance(calibration, dict)
    suffix = f" (version {calibration['version']})" if version else ""
    return f"{counted(calibration['measurements'], 'measurement')} on this cluster{suffix}"


def print_recommendations(answer: RecommendAnswer) -> None:
    """The ranked configurations, and how many each rule rejected."""
    console = wide_console()
    ranked = [row for row in answer.recommendations if isinstance(row, Recommendation)]
    heads, configurations = configuration_cells([row.parallel for row in ranked])
    calibrated = next((row.calibrated_estimate for row in ranked if row.calibrated_estimate is not None), None)
    rows = []
    for row, configuration in zip(ranked, configurations, strict=True):
        e = row.calibrated_estimate or row.estimate
        before = (duration(row.estimate.time.step_s),) if calibrated and row.estimate.time is not None else ()
        assert e.time is not None and e.memory is not None and e.mfu is not None
        figures = (duration(e.time.step_s), f"{e.mfu:.1%}", gib(e.memory.total_bytes), _days(e.calendar_days))
        rows.append((str(row.rank), str(row.group), *configuration, *before, *figures, *_win_and_risk(row, ranked[0])))
    before_head = ("before",) if calibrated else ()
    heads_shown = ("rank", "group", *heads, *before_head, "step", "MFU", "memory", "days", "against 1", "risk")
    print_table(console, heads_shown, rows, title="best configurations by the cost model")
    _print_space(console, answer)
    _print_groups(console, answer.groups)
    if calibrated is not None:
        console.print(f"ranked after {_calibration(calibrated)}; before: the cost model alone")
    print_nearest(console, answer.nearest_misses)
    _print_rejections(console, answer)


def _win_and_risk(row: Recommendation, first: Recommendation) -> tuple[str, str]:
    """The expected step against that of the row to try, and the chance of running out of memory."""
    if row.expected_step_s is None or first.expected_step_s is None or row.out_of_memory_probability is None:
        return "-", "-"
    change = row.expected_step_s / first.expected_step_s - 1.0
    return f"{change:+.1%}" if row is not first else "-", f"{row.out_of_memory_probability:.1%}"


def print_nearest(console: Console, nearest: Iterable[object]) -> None:
    """If no configuration is acceptable: those that come nearest, and what each of them lacks."""
    for row in nearest:
        if isinstance(row, Recommendation):
            console.print(f"nearest: {arithmetic(row.parallel)}")
            print_reasons(console, (row.calibrated_estimate or row.estimate).reasons, prefix="  ")
        elif isinstance(row, ServingRecommendation):
            reasons = "; ".join(reason.message for reason in (row.calibrated_estimate or row.estimate).reasons)
            line = f"nearest: {_layout(row)}, {row.parallel.max_num_seqs} requests at once: {reasons}"
            line += _bearable(row.estimate.highest_load)
            console.print(line, highlight=False)


def print_pareto(answer: RecommendAnswer) -> None:
    """The Pareto-optimal configurations, if the answer has them."""
    if answer.pareto is None:
        return
    heads, configurations = configuration_cells([row.parallel for row in answer.pareto])
    rows = []
    for row, configuration in zip(answer.pareto, configurations, strict=True):
        e = row.calibrated_estimate or row.estimate
        assert e.time is not None and e.memory is not None
        figures = (duration(e.time.step_s), f"{e.tokens_per_second:,.0f}", gib(e.memory.total_bytes), _days(e.calendar_days))
        rows.append((str(e.provenance["num_gpus"]), *configuration, *figures))
    title = "Pareto-optimal configurations"
    print_table(wide_console(), ("GPUs", *heads, "step", "tokens/s", "memory", "days"), rows, title=title)


def print_sensitivity(found: Sensitivity | None) -> None:
    """Step time, days and cost over numbers of devices; the price of each axis left out, and the gain of better hardware."""
    if found is None:
        return
    console = wide_console()
    points = [
        (
            f"{point.num_gpus:,}", duration(point.step_s), f"{point.tokens_per_second_per_gpu:,.0f}", _days(point.days),
            "-" if point.cost is None else f"${point.cost:,.0f}", arithmetic(point.parallel),
        )
        for point in found.scaling
    ]  # fmt: skip
    heads = ("GPUs", "step", "tokens/s/GPU", "days", "cost", "configuration")
    print_table(console, heads, points, title="fastest configuration by number of GPUs")
    if found.fewest_gpus_near_cheapest is not None:
        console.print(
            f"within 5% of the lowest cost: {found.fewest_gpus_near_cheapest:,} to {found.fastest_gpus_near_cheapest:,} GPUs"
        )
    changes = [
        (
            one.change,
            "nothing fits" if one.step_s is None else duration(one.step_s),
            "-" if one.change_fraction is None else f"{one.change_fraction:+.1%}",
        )
        for one in (*found.axes, *found.hardware)
    ]
    print_table(console, ("change", "fastest step", "against now"), changes, title="what it depends on", left=1)


def _goodput_line(goodput: Goodput) -> str:
    """The share of the calendar time that is training, and where it comes from, on one line."""
    return (
        f"goodput {goodput.fraction:.1%}: a failure every {duration(goodput.mtbf_s)}, "
        f"a checkpoint of {duration(goodput.checkpoint_s)} every {duration(goodput.checkpoint_interval_s)}, "
        f"{duration(goodput.restart_s)} to restart"
    )


def _days(days: float | None) -> str:
    return "-" if days is None else f"{days:.1f}"


def print_inference_estimate(estimate: InferenceEstimate) -> None:
    """One configuration: memory by part, why it is infeasible with how to fix it, and latencies with intervals and tails."""
    console = wide_console()
    if estimate.parallel is not None:
        console.print(serving_arithmetic(estimate.parallel, replicas=estimate.replicas))
    print_reasons(console, estimate.reasons)
    if estimate.highest_load is not None:
        console.print(f"it bears a load of {estimate.highest_load:,.4g}", highlight=False)
    if estimate.memory is not None:
        memory = estimate.memory
        console.print(f"memory on the fullest device: {gib(memory.total_bytes)} of {gib(memory.capacity_bytes)}")
        _print_parts(console, memory.parts_bytes)
    if not estimate.feasible:
        rows = [
            (
                fix.change,
                *map(duration, (fix.ttft_s, fix.tpot_s, fix.request_latency_s)),
                f"{fix.output_tokens_per_second_per_gpu:,.0f}",
                "-" if fix.throughput_change_fraction is None else f"{fix.throughput_change_fraction:+.1%}",
                gib(fix.memory_total_bytes),
            )
            for fix in estimate.mends
        ]
        heads = ("TTFT", "TPOT", "request", "tokens/s/GPU", "change", "memory")
        _print_fixes(console, heads, rows, {fix.change: fix.remaining for fix in estimate.mends})
    if estimate.tails is None or estimate.intervals is None:
        return
    rows = []
    for name in ("ttft_s", "tpot_s", "request_latency_s"):
        tail, interval = getattr(estimate.tails, name), getattr(estimate.intervals, name, None)
        between = f"{duration(interval[0])} to {duration(interval[1])}" if interval else ""
        figures = (duration(getattr(estimate, name)), between, *map(duration, (tail.p50, tail.p90, tail.p99)))
        rows.append((name.removesuffix("_s").replace("_", " "), *figures))
    print_table(console, ("", "mean", "90 % interval", "p50", "p90", "p99"), rows, title="latency")
    limit = "limited by the KV cache" if estimate.kv_cache_limited else "all that are in flight"
    console.print(
        f"{estimate.output_tokens_per_second_per_gpu:,.0f} output tokens/s/GPU, {estimate.running_requests:,.0f} requests "
        f"running ({limit}), at most {estimate.max_concurrency:,}; never preempted up to "
        f"{estimate.max_concurrency_without_preemption:,}"
    )
    console.print(
        f"{estimate.concurrency:,.4g} requests in flight, {estimate.request_rate_per_second:,.3g} a second, of "
        f"{estimate.users:,} people with one at a time"
    )
    if estimate.goodput is not None:
        goodput = estimate.goodput
        rate = f"{goodput.requests_per_second_per_gpu:,.3g} requests/s/GPU"
        console.print(f"goodput: {rate} within the targets, {goodput.fraction:.0%} of all")
    if estimate.cost_per_million_output_tokens is not None:
        console.print(f"${estimate.cost_per_million_output_tokens:,.2f} per million output tokens", end="")
        console.print(" ($/M in, $/M out: " + ", ".join(_prices(estimate)) + ")" if estimate.cost_per_million_tokens else "")


def print_serving_recommendations(answer: RecommendAnswer) -> None:
    """The ranked configurations, and how many each rule rejected."""
    console = wide_console()
    rows = []
    for row in answer.recommendations:
        assert isinstance(row, ServingRecommendation)
        e = row.estimate
        assert e.memory is not None
        latencies = _latencies(e.ttft_s, e.tpot_s, e.request_latency_s)
        load = (f"{e.output_tokens_per_second_per_gpu:,.0f}", f"{e.concurrency:,.0f}", f"{e.users:,}")
        rows.append((str(row.rank), _layout(row), *latencies, *load, *_prices(e), gib(e.memory.total_bytes)))
    heads = ("rank", "layout", "TTFT", "TPOT", "request", "tokens/s/GPU", "in flight", "users", *_PRICES, "memory")
    print_table(console, heads, rows, title="best serving configurations by the cost model")
    _print_space(console, answer)
    _print_alike(console, [row for row in answer.recommendations if isinstance(row, ServingRecommendation)])
    print_nearest(console, answer.nearest_misses)
    _print_rejections(console, answer)
    if answer.disaggregated is not None:
        _print_pools(console, answer.disaggregated)
    if answer.throughput_front is not None:
        _print_pareto(console, answer.throughput_front)


def _print_pools(console: Console, ranked: Sequence[PoolRecommendation]) -> None:
    heads = ("rank", "prefill", "decode", "TTFT", "TPOT", "request", "tokens/s/GPU", "GPUs", "prefill busy")
    rows = []
    for row in ranked:
        e = row.estimate
        pools = (f"{pool.replicas} x {pool_sizes(pool)} {pool.gpu}" for pool in (row.prefill, row.decode))
        latencies = _latencies(e.ttft_s, e.tpot_s, e.request_latency_s)
        throughput = f"{e.output_tokens_per_second_per_gpu:,.0f}"
        rows.append((str(row.rank), *pools, *latencies, throughput, str(e.num_gpus), f"{e.prefill_busy:.0%}"))
    print_table(console, heads, rows, title="separate pools for prefill and decoding")


def _print_pareto(console: Console, optimal: Sequence[ServingRecommendation]) -> None:
    rows = []
    for row in optimal:
        e = row.estimate
        rates = (e.output_tokens_per_second_per_user, e.output_tokens_per_second_per_gpu)
        load = str(e.provenance["load"]).split(", ")[1]
        rows.append((_layout(row), load, f"{rates[0]:,.1f}", f"{rates[1]:,.0f}", *_latencies(e.ttft_s, e.tpot_s)))
    heads = ("layout", "load", "tokens/s/user", "tokens/s/GPU", "TTFT", "TPOT")
    print_table(console, heads, rows, title="Pareto-optimal configurations: throughput per user and per GPU")


def print_tuned_serving(console: Console, ranked: Sequence[ServingRecommendation]) -> None:
    """Latencies predicted before the runs, and predicted or measured after them."""
    rows = []
    for row in ranked:
        before, after = row.estimate, row.calibrated_estimate or row.estimate
        latencies = _latencies(before.ttft_s, after.ttft_s, before.tpot_s, after.tpot_s)
        throughput = f"{after.output_tokens_per_second_per_gpu:,.1f}"
        source = "run" if row.measurement else "prediction"
        rows.append((str(row.rank), _layout(row), str(row.parallel.max_num_seqs), *latencies, throughput, source))
    heads = ("rank", "layout", "batch", "TTFT before", "after", "TPOT before", "after", "tokens/s/GPU", "source")
    title = "latency under the whole load, before and after the runs"
    print_table(console, heads, rows, title=title, bold_first=ranked[0].rank == 1)
    best = ranked[0]
    source = "measured" if best.measurement else "predicted, not measured"
    line = f"best: {_layout(best)}, {best.parallel.max_num_seqs} requests at once ({source})"
    console.print(line, style="bold", highlight=False)


def _bearable(load: float | None) -> str:
    return "" if load is None else f"; it bears a load of {load:,.4g}"


def _layout(row: ServingRecommendation) -> str:
    return serving_arithmetic(row.parallel, replicas=row.estimate.replicas)


_PRICES = ("$/M in", "$/M out")


def _prices(e: InferenceEstimate) -> tuple[str, ...]:
    prices = e.cost_per_million_tokens
    return ("-", "-") if prices is None else (f"{prices.input:,.2f}", f"{prices.output:,.2f}")


def _latencies(*seconds: float | None) -> Iterable[str]:
    return ("-" if each is None else duration(each) for each in seconds)


def print_sizing(sizing: Sizing) -> None:
    """The model, its tokens and days, the reasons for its shape, and starting hyperparameters."""
    console = wide_console()
    model = sizing.model
    total = "" if sizing.parameters == sizing.active_parameters else f" of {_short(sizing.parameters)}"
    experts = f", {model.num_experts} experts, {model.num_experts_per_tok} per token" if model.num_experts else ""
    console.print(
        f"{model.name}: {model.num_hidden_layers} layers x {model.hidden_size} hidden, {model.num_attention_heads} heads, "
        f"{model.kv_heads} key/value heads, {model.ffn_size} MLP, vocabulary {model.vocab_size}{experts}"
    )
    console.print(
        f"{_short(sizing.active_parameters)}{total} parameters, {_short(sizing.tokens)} tokens "
        f"({sizing.tokens_per_parameter:.1f} per parameter), {sizing.flops:.3g} model FLOPs"
    )
    over = f", {sizing.compute_overhead:.0%} more compute than the optimum" if sizing.compute_overhead >= 0.01 else ""
    console.print(f"predicted loss {sizing.loss.value:.3f} {sizing.loss.unit}{over}")
    print_reasons(console, sizing.reasons)
    _print_time(console, sizing)
    _print_choices(console, "shape, and the reasons for it", sizing.shape)
    _print_choices(console, "starting hyperparameters", (sizing.law, *sizing.hyperparameters))


def _print_time(console: Console, sizing: Sizing) -> None:
    goodput, chosen = sizing.goodput, sizing.recommendation
    if chosen is None or goodput is None or sizing.days is None or sizing.effective_days is None:
        return
    console.print(arithmetic(chosen.parallel))
    cost = f", ${sizing.cost:,.0f}" if sizing.cost is not None else ""
    console.print(
        f"{sizing.effective_days:.1f} days on {sizing.num_gpus:,} devices ({sizing.days:.1f} without failures), "
        f"{sizing.gpu_hours:,.0f} GPU-hours{cost}"
    )
    console.print(_goodput_line(goodput))


def _print_choices(console: Console, title: str, choices: tuple[Choice, ...]) -> None:
    if not choices:
        return
    table = Table(title=title)
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("rule")
    table.add_column("source")
    for choice in choices:
        outside = " (extrapolated)" if choice.extrapolated else ""
        table.add_row(choice.name, f"{_value(choice.value)} {choice.unit}".strip(), choice.rule, choice.source + outside)
    console.print(table)


def _value(value: float | int | str | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{each:g}" for each in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _short(count: float) -> str:
    """`70.2B` for 70.2 billion."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:,.0f}"
