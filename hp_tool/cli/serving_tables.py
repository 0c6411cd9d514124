"""Terminal tables of serving results."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from hp_tool.cli.layout import make_console, print_columns
from hp_tool.cli.tables import (
    highest_load_of,
    print_familiarity,
    print_fixes,
    print_groups,
    print_memory_parts,
    print_nearest,
    print_reasons,
    print_rejections,
    print_space,
)
from hp_tool.domain.inference import RATE_PATH
from hp_tool.domain.latencies import LATENCIES
from hp_tool.domain.measurement import Tails
from hp_tool.domain.query import Query
from hp_tool.domain.serving import (
    InferenceEstimate,
    PoolConfig,
    PoolEstimate,
    PoolRecommendation,
    ServingRecommendation,
)
from hp_tool.domain.targets import Targets
from hp_tool.domain.units import format_count, format_duration, format_gib
from hp_tool.questions.answers import RecommendAnswer
from hp_tool.questions.serving.problem import counts_by_rate, unknown_loads
from hp_tool.wording import figures, rankings
from hp_tool.wording.columns import (
    ABSENT,
    Column,
    counts,
    decimals,
    duration_column,
    figure_column,
    percents,
    scale_values,
    serving_columns,
    terminal_columns,
)
from hp_tool.wording.short import serving_figures_words, serving_layout_words, use_serving_words
from hp_tool.wording.words import assumption_sentences, cache_words, serving_arithmetic

POOL_MEANING = "replicas x tensor (TP), attention data (ADP) and expert parallel (EP) ranks"


def print_inference_estimate(estimate: InferenceEstimate, *, query: Query) -> None:
    """Print one configuration: memory by part, latencies with intervals and quantiles and, if it is
    infeasible, the reasons and fixes.
    """
    console, targets = make_console(), query.targets or Targets()
    if estimate.parallel is not None:
        outcome = (
            serving_figures_words(estimate, targets=targets)
            if estimate.feasible
            else "not feasible"
        )
        console.print(
            f"{serving_layout_words(estimate.parallel, estimate.replicas)}: {outcome}.",
            highlight=False,
        )
    print_assumptions(console, [estimate.provenance])
    print_reasons(console, estimate.reasons)
    if estimate.highest_load is not None:
        console.print(f"Highest load: {highest_load_of(estimate, query)}.", highlight=False)
    if estimate.memory is not None:
        memory = estimate.memory
        console.print(
            f"Memory: {format_gib(memory.total_bytes)} of {format_gib(memory.capacity_bytes)} "
            f"usable",
            style="bold",
        )
        print_memory_parts(console, memory.parts_bytes)
    if estimate.kv_cache is not None:
        console.print(cache_words(estimate.kv_cache), highlight=False)
    if not estimate.feasible:
        _print_fixes(console, estimate)
    if estimate.tails is None or estimate.intervals is None:
        return
    _print_latencies(console, estimate, estimate.tails)
    print_familiarity(console, estimate)
    limit = ", limited by the KV cache" if estimate.kv_cache_limited else ""
    count = round(estimate.running_requests or 0.0)
    running = f"{format_count(count, 'request')} {'runs' if count == 1 else 'run'} at once"
    console.print(
        f"{running}{limit}; at most "
        f"{estimate.max_concurrency:,} fit, {estimate.max_concurrency_without_preemption:,} "
        "without preemption.",
        highlight=False,
    )
    flying = "1 request" if estimate.concurrency == 1 else f"{estimate.concurrency:,.4g} requests"
    console.print(
        f"{_load_name(query)}: {flying} in flight, {estimate.request_rate_per_second:,.3g} per "
        f"second ({format_count(estimate.users or 0, 'user')} with one request at a time).",
        highlight=False,
    )
    if estimate.goodput is not None:
        goodput = estimate.goodput
        rate = f"{goodput.requests_per_second_per_gpu:,.3g} requests/s/GPU"
        console.print(f"goodput: {rate} within the targets, {goodput.fraction:.0%} of all")
    if estimate.cost_per_million_output_tokens is not None:
        prices = estimate.cost_per_million_tokens
        hourly = estimate.provenance.get("price_per_gpu_hour")
        apart = (
            ""
            if prices is None
            else f" if input is free; or ${prices.input:,.2f} per million input and "
            f"${prices.output:,.2f} per million output tokens"
        )
        at = f"At ${hourly:,.2f} per GPU-hour: " if isinstance(hourly, int | float) else ""
        console.print(
            f"{at}${estimate.cost_per_million_output_tokens:,.2f} per "
            f"million output tokens{apart}.",
            highlight=False,
        )


def _load_name(query: Query) -> str:
    """Return a label for the load of an estimate: `Load` if the query sets the load, else how it
    was chosen, such as `Highest load that fits`.
    """
    workload = query.inference
    if workload is None or workload.trace is not None or unknown_loads(workload) is None:
        return "Load"
    if workload.load is not None and workload.load.arrival in ("offline", "burst"):
        return "Load"
    if any((query.targets or Targets()).limits()):
        return "Highest load within the targets"
    return "Highest sustained load" if counts_by_rate(workload) else "Highest load that fits"


def _target_columns(
    estimates: Sequence[InferenceEstimate | PoolEstimate], targets: Targets
) -> list[Column]:
    return [
        duration_column(
            f"{LATENCIES[latency].head} {quantile}",
            [
                None
                if estimate.tails is None
                else getattr(estimate.tails, latency).quantiles[quantile]
                for estimate in estimates
            ],
            meaning=f"target {format_duration(limit)}",
        )
        for _, latency, quantile, limit in targets.limits()
        if quantile is not None
    ]


def print_assumptions(console: Console, provenances: Iterable[Mapping[str, object]]) -> None:
    """Print the assumptions of all rows, without repetitions."""
    for sentence in dict.fromkeys(
        each for provenance in provenances for each in assumption_sentences(provenance)
    ):
        console.print(sentence, highlight=False)


def _print_fixes(console: Console, estimate: InferenceEstimate) -> None:
    fixes = estimate.fixes
    memory, ttft, tpot, tokens, more = figures.SERVED_AFTER_FIX
    columns = [
        figure_column(ttft, fixes),
        figure_column(tpot, fixes),
        figure_column(figures.REQUEST, fixes, drop=3),
        figure_column(tokens, fixes, drop=1),
        figure_column(more, fixes, drop=4),
        figure_column(memory, fixes, drop=2),
    ]
    print_fixes(console, columns, {fix.change: fix.remaining for fix in fixes})


DROP_PRIORITIES = {"p50": 2, "p90": 1}
"""`Column.drop` for quantiles that are hidden in a narrow terminal."""


def _print_latencies(console: Console, estimate: InferenceEstimate, tails: Tails) -> None:
    """Print a line for each latency in milliseconds: mean, interval, and quantiles over
    requests.
    """
    shown = (figures.TTFT, figures.TPOT, figures.REQUEST)
    intervals = [figure.stored_interval(estimate) for figure in shown]
    quantiles = [getattr(tails, figure.name).quantiles for figure in shown]
    columns = [
        Column(head="latency", cells=tuple(figure.label.lower() for figure in shown), left=True),
        Column(
            head="mean", unit="ms", cells=_milliseconds(figure.value(estimate) for figure in shown)
        ),
        Column(
            head="interval",
            unit="90%, ms",
            cells=tuple(
                "-".join(scale_values(ends, 1e-3)) if ends else ABSENT for ends in intervals
            ),
        ),
        *(
            Column(
                head=p,
                unit="ms",
                cells=_milliseconds(quantile[p] for quantile in quantiles),
                drop=DROP_PRIORITIES.get(p, 0),
            )
            for p in quantiles[0]
        ),
    ]
    print_columns(console, columns)


def _milliseconds(values_s: Iterable[float | None]) -> tuple[str, ...]:
    return tuple(scale_values([value_s], 1e-3)[0] for value_s in values_s)


def print_serving_recommendations(answer: RecommendAnswer, *, query: Query) -> None:
    """Print the ranked configurations, and the number of candidates rejected by each rule."""
    console, targets = make_console(), query.targets or Targets()
    ranked = [row for row in answer.recommendations if isinstance(row, ServingRecommendation)]
    listed_rates = any(RATE_PATH in row.set for row in ranked)
    if listed_rates:
        _print_gpus_by_rate(console, ranked, targets)
    elif ranked:
        best = ranked[0]
        console.print(use_serving_words(best, targets=targets), highlight=False)
        print_familiarity(console, best.estimate)
        if len(ranked) > 1:
            columns = [
                *terminal_columns([rankings.RANK], ranked),
                *serving_columns(ranked),
                *_target_columns([row.preferred_estimate for row in ranked], targets),
                *terminal_columns(rankings.SERVING_FIGURES, ranked),
            ]
            print_columns(console, columns, bold_first=True)
    pools = [row.estimate.provenance for row in answer.disaggregated or ()]
    print_assumptions(console, [*(row.estimate.provenance for row in ranked), *pools])
    for rule in dict.fromkeys(
        str(row.estimate.provenance["queue"])
        for row in ranked
        if "queue" in row.estimate.provenance
    ):
        console.print(f"Assumed: {rule}.", highlight=False)
    print_space(console, answer)
    if not listed_rates:  # Rows of other rates answer other queries.
        print_groups(console, ranked)
    print_nearest(console, answer.nearest_misses, query=query)
    print_rejections(console, answer)
    if answer.disaggregated:
        _print_pools(console, answer.disaggregated, targets)
    if answer.throughput_front:
        _print_pareto(console, answer.throughput_front)


def _print_pools(console: Console, ranked: Sequence[PoolRecommendation], targets: Targets) -> None:
    estimates = [row.estimate for row in ranked]
    mixed = len({pool.gpu for row in ranked for pool in (row.prefill, row.decode)}) > 1
    prefill, decode = zip(
        *((_pool_words(row.prefill, mixed), _pool_words(row.decode, mixed)) for row in ranked),
        strict=True,
    )
    columns = [
        *terminal_columns([rankings.RANK], ranked),
        Column(head="prefill", cells=prefill, left=True, meaning=POOL_MEANING),
        Column(head="decode", cells=decode, left=True),
        *_target_columns(estimates, targets),
        figure_column(figures.TTFT, estimates),
        figure_column(figures.TPOT, estimates),
        figure_column(figures.REQUEST, estimates, drop=4),
        figure_column(figures.OUTPUT, estimates),
        figure_column(figures.CONCURRENCY, estimates, drop=1),
        Column(head="GPUs", cells=tuple(str(e.num_gpus) for e in estimates), drop=2),
        Column(
            head="busy",
            unit="%",
            cells=percents(e.prefill_busy for e in estimates),
            meaning="fraction of time in which prefill replicas work",
            drop=3,
        ),
    ]
    print_columns(console, columns, title="separate pools for prefill and decoding")


def _pool_words(pool: PoolConfig, mixed: bool) -> str:
    """Return `2 x TP 4 ADP 4 EP 16`. With `mixed`, include the name of the GPU."""
    sizes = {
        "ADP": pool.attention_data_parallel_size,
        "EP": pool.expert_parallel_size,
        "spare": pool.redundant_experts,
    }
    used = "".join(f" {name} {size}" for name, size in sizes.items() if size > int(name != "spare"))
    return f"{pool.replicas} x TP {pool.tensor_parallel_size}{used}" + (
        f" {pool.gpu}" if mixed else ""
    )


def _print_pareto(console: Console, optimal: Sequence[ServingRecommendation]) -> None:
    estimates = [row.estimate for row in optimal]
    columns = [
        *serving_columns(optimal),
        Column(
            head="load",
            cells=tuple(str(e.provenance["load"]).split(", ")[1] for e in estimates),
            left=True,
            drop=1,
        ),
        Column(
            head="tokens",
            unit="/s/user",
            cells=decimals(e.output_tokens_per_second_per_user for e in estimates),
        ),
        *terminal_columns([rankings.TTFT, rankings.TPOT], estimates),
        figure_column(figures.OUTPUT, estimates),
    ]
    print_columns(
        console, columns, title="Pareto front: throughput per user against throughput per GPU"
    )


def _print_gpus_by_rate(
    console: Console, rows: Sequence[ServingRecommendation], targets: Targets
) -> None:
    columns = [
        *terminal_columns([rankings.RANK], rows),
        Column(
            head="rate",
            unit="/s",
            cells=tuple(f"{row.set[RATE_PATH]:g}" for row in rows),
            meaning="requests",
        ),
        *serving_columns(rows),
        *_target_columns([row.preferred_estimate for row in rows], targets),
        *terminal_columns(rankings.SERVING_FIGURES, rows),
    ]
    print_columns(console, columns, title="fewest GPUs for each request rate, by the cost model")


def print_tuned_serving(console: Console, ranked: Sequence[ServingRecommendation]) -> None:
    """Print the latencies that were predicted before the runs, and those predicted or measured
    after them.
    """
    before = [row.estimate for row in ranked]
    after = [row.preferred_estimate for row in ranked]
    columns = [
        *terminal_columns([rankings.RANK], ranked),
        *serving_columns(ranked),
        Column(
            head="batch",
            cells=counts(row.parallel.max_num_seqs for row in ranked),
            meaning="engine limit (max_num_seqs)",
        ),
        figure_column(figures.TTFT, before, head="TTFT before", drop=2),
        figure_column(figures.TTFT, after),
        figure_column(figures.TPOT, before, head="TPOT before", drop=1),
        figure_column(figures.TPOT, after),
        figure_column(figures.OUTPUT, after),
        Column(
            head="source",
            cells=tuple("run" if row.measurement else "prediction" for row in ranked),
            left=True,
            drop=3,
        ),
    ]
    title = "latency under the full load, before and after the runs"
    print_columns(console, columns, title=title, bold_first=ranked[0].rank == 1)
    best = ranked[0]
    source = "measured" if best.measurement else "predicted, not measured"
    layout = serving_arithmetic(best.parallel, replicas=best.estimate.replicas)
    console.print(
        f"best: {layout}, engine limit {best.parallel.max_num_seqs} ({source})",
        style="bold",
        highlight=False,
    )
