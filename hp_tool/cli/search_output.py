"""Show the progress of a search on standard error, and its result as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column as TableColumn
from rich.text import Text

from hp_tool.cli.layout import make_console, print_columns
from hp_tool.cli.serving_tables import print_tuned_serving
from hp_tool.cli.tables import print_nearest, print_unmeasured
from hp_tool.domain.answer import get_verdict
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.plan import PlannedRun, SearchPlan
from hp_tool.domain.query import Query
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingConfig, ServingRecommendation
from hp_tool.domain.units import format_count, format_duration
from hp_tool.loop.tuning.result import TuneResult
from hp_tool.wording import figures, rankings
from hp_tool.wording.answer import answer_sentences, answer_title, stop_reason
from hp_tool.wording.bill import expected_words, format_device_time, range_words, worst_case_words
from hp_tool.wording.columns import (
    Column,
    configuration_columns,
    counts,
    duration_unit,
    figure_column,
    scale_values,
    terminal_columns,
)
from hp_tool.wording.fit import unrun_settings_words
from hp_tool.wording.short import layout_words
from hp_tool.wording.words import brief_layout, layout_arithmetic

MAX_ROWS = 10
"""Maximum rank of rows without a measurement. Rows with a measurement are always shown."""


MIN_SHOWN_S = 1.0
"""Minimum total queueing time of jobs, in seconds, for it to be reported."""
BAR_WIDTH = 20


class RunClock(ProgressColumn):
    """Progress column with the seconds since the current run started. It is empty between runs."""

    def render(self, task: Task) -> Text:
        """Return the cell for a task."""
        since = task.fields["since"]
        return Text("" if since is None else f"{task.get_time() - since:.0f} s")


class SearchProgress:
    """Progress bar of a search: used budget, the current run with its duration, and a line for
    every finished run.

    Events come from a search in this process or on a server. In files and pipes, there is no bar.
    Instead, a line is printed for every run that starts.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(
                bar_width=BAR_WIDTH if self._console.width >= 4 * BAR_WIDTH else BAR_WIDTH // 4
            ),
            TimeElapsedColumn(),
            RunClock(),
            TextColumn(
                "{task.description}",
                table_column=TableColumn(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
        )
        self._task: TaskID = self._progress.add_task("starting", total=None, since=None)
        self._search_id: str | None = None
        self._budget = 0

    def __enter__(self) -> SearchProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if kind is KeyboardInterrupt and self._search_id is not None:
            self._print(f"interrupted; continue with: hp-tool tune --resume {self._search_id}")

    def on_event(self, kind: str, payload: dict[str, Any]) -> None:
        """Show an event of a search. Events without progress are ignored."""
        match kind:
            case "started":
                done, self._search_id, self._budget = (
                    payload.get("profile_runs", 0),
                    payload["search_id"],
                    payload["budget_runs"],
                )
                self._progress.update(
                    self._task, total=self._budget, completed=done, description=CHOOSING_TEXT
                )
                chosen = (
                    f", {payload['candidates']:,} configurations to choose from"
                    if "candidates" in payload
                    else ""
                )
                self._print(f"search {payload['search_id']}: at most {self._budget} runs{chosen}")
            case "run_started" | "proposed":
                self._start(
                    f"run {payload['number'] + 1}: {_run_label(payload)}, "
                    f"{_prediction_words(payload)}"
                )
            case "run_finished":
                self._finish(
                    f"run {payload['number'] + 1}: {_run_label(payload)}: {_outcome_words(payload)}"
                )
            case "run" if payload["state"] == "finished":  # This event comes from a server.
                self._finish(f"run {payload['number'] + 1}: {_outcome_words(payload)}")
            case "run_abandoned":
                self._print(f"run {payload['number'] + 1} abandoned: {payload['cause']}")
            case "pending":
                self._progress.update(
                    self._task, description=f"waiting for devices: {pending_words(payload)}"
                )
            case "preflight":
                slow = [
                    f"{each['kind']} {each['name']} ({each['slowdown']:.2f} times its peers)"
                    for each in payload["slow"]
                ]
                self._print(
                    "preflight: "
                    f"{'; '.join(slow) or payload['cause'] or 'no slow node, device or link'}"
                )
            case "waiting":
                self._print(f"waiting: {payload['waiting_for']}")

    def _start(self, line: str) -> None:
        self._progress.update(self._task, description=line, since=self._progress.get_time())
        if not self._console.is_terminal:
            self._print(line)

    def _finish(self, line: str) -> None:
        self._progress.update(self._task, advance=1, description=CHOOSING_TEXT, since=None)
        self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)


CHOOSING_TEXT = "choosing the next run"


def pending_words(pending: dict[str, Any]) -> str:
    """Return the scheduler's reason why a job waits, and the job's expected start."""
    starts_at = pending.get("starts_at")
    return (pending.get("reason") or "no reason given") + (
        f", expected to start at {starts_at}" if starts_at else ""
    )


def _run_label(payload: dict[str, Any]) -> str:
    from hp_tool.questions.schema import parse

    return brief_layout(
        parse(
            ServingConfig if "max_num_seqs" in payload["parallel"] else ParallelConfig,
            payload["parallel"],
        )
    )


def _prediction_words(payload: dict[str, Any]) -> str:
    step_s = payload.get("predicted", payload).get("calibrated_step_s")
    return f"predicted {format_duration(step_s)} per step" if step_s else "starting"


def _outcome_words(payload: dict[str, Any]) -> str:
    if payload.get("status") != "ok":
        return f"{payload.get('status')}: {payload.get('cause') or 'see the log'}"
    predicted = payload.get("predicted", {}).get("calibrated_step_s")
    before = f"predicted {format_duration(predicted)}, " if predicted else ""
    how = "a reduced run implies" if payload.get("reduced") else "measured"
    return f"{before}{how} {format_duration(payload['step_s'])}"


def print_result(result: TuneResult, *, pareto: bool = False, query: Query | None = None) -> None:
    """Print the ranking (or the Pareto-optimal configurations), the best configuration, and the
    cost of the search.

    `query` is the query of the search; None for a resumed search.
    """
    console = make_console()
    trained = [row for row in result.recommendations if isinstance(row, Recommendation)]
    served = [row for row in result.recommendations if isinstance(row, ServingRecommendation)]
    if result.error is not None:
        console.print(f"[red]{result.error['message']}[/red]")
    if trained:
        best, source = trained[0], "predicted, not measured"
        if best.measurement is not None:
            source = (
                "measured" if best.measurement.fidelity.is_whole else "implied by a reduced run"
            )
        if result.answer is not None:
            chosen = get_verdict(result.answer).parallel
            words = layout_words(chosen) if isinstance(chosen, ParallelConfig) else ""
            known = f" ({source})" if chosen == best.parallel else ""
            console.print(
                f"{answer_title(result.answer)}: {words}{known}", style="bold", highlight=False
            )
        for path, value in best.set.items():
            console.print(f"Set for all runs: {path} {value}", highlight=False)
        if unrun := unrun_settings_words(best.estimate.provenance.get("unrun")):
            console.print(unrun, highlight=False)
    for sentence in answer_sentences(result.answer) if result.answer else ():
        console.print(sentence, highlight=False)
    if served:
        print_tuned_serving(console, served)
    else:
        _print_trained(console, list(result.pareto) if pareto else trained, pareto=pareto)
    print_nearest(console, result.nearest_misses, query=query)
    for line in _search_cost_lines(result):
        console.print(line, highlight=False)


def plan_lines(plan: SearchPlan) -> list[str]:
    """Return the lines that describe the estimated cost of a search."""
    lines = [f"{'first run':12}  {_planned_run_words(plan.first)}"]
    if plan.confirmation is not None:
        lines.append(f"{'confirmation':12}  {_planned_run_words(plan.confirmation)}")
    lines += [f"{'all runs':12}  {path} {value}" for path, value in plan.set.items()]
    if unrun := unrun_settings_words(plan.unrun):
        lines.append(unrun)
    return [
        *lines,
        f"{'the search':12}  {expected_words(plan)}",
        f"{'at worst':12}  {worst_case_words(plan)}",
    ]


def _planned_run_words(run: PlannedRun) -> str:
    fidelity = run.fidelity
    sizes = {"layers": fidelity.num_hidden_layers, "replicas": fidelity.data_parallel_size}
    sizes |= {"micro-batches": fidelity.num_micro_batches}
    reductions = ", ".join(
        f"{number} {name}" for name, number in sizes.items() if number is not None
    )
    job_text = f" with {run.configurations - 1} more in its job" if run.configurations > 1 else ""
    wall_text = range_words(run.wall_s, run.wall_s_interval, format_duration)
    return (
        f"{layout_arithmetic(run.parallel)}, "
        f"{f'reduced to {reductions}' if reductions else 'full size'}{job_text}: "
        f"{format_count(run.num_nodes, 'node')}, "
        f"{format_count(run.num_gpus, 'GPU')}, {wall_text} (limit "
        f"{format_duration(run.time_limit_s)}), "
        f"step {format_duration(run.step_s)}, {format_device_time(run.gpu_seconds)}, "
        f"{run.hold_probability:.0%} chance of success"
    )


def _print_trained(console: Console, ranked: Sequence[Recommendation], *, pareto: bool) -> None:
    shown = [row for row in ranked if pareto or row.measurement is not None or row.rank <= MAX_ROWS]
    if not shown:
        return
    calibrated = [row.calibrated_estimate for row in shown]
    before = [row.estimate for row in shown]
    measured = [row.measurement.objective_s if row.measurement else None for row in shown]
    is_full_size = [
        row.measurement is not None and row.measurement.fidelity.is_whole for row in shown
    ]
    rates = [
        row.measurement.tokens_per_second_per_gpu if row.measurement and w else None
        for row, w in zip(shown, is_full_size, strict=True)
    ]
    predicted = map(figures.STEP.value, [*before, *calibrated])
    shared_unit = unit, size = duration_unit([*predicted, *measured])
    marks = (
        "" if w or step is None else "~" for w, step in zip(is_full_size, measured, strict=True)
    )
    measured_cells = list(map("".join, zip(marks, scale_values(measured, size), strict=True)))
    for place, row in enumerate(shown):
        if row.measured_range_s is not None:  # The runs differ, so show a range.
            measured_cells[place] = "-".join(scale_values(row.measured_range_s, size))
    columns = [
        *terminal_columns([rankings.RANK], shown),
        *configuration_columns([row.parallel for row in shown]),
        figure_column(figures.STEP, before, head="model", drop=6, shared_unit=shared_unit),
        figure_column(figures.STEP, calibrated, head="calibrated", shared_unit=shared_unit),
        *terminal_columns([rankings.STEP], calibrated, shared_unit=shared_unit)[1:],
        Column(head="measured", unit=unit, cells=tuple(measured_cells)),
        Column(
            head="tokens",
            unit="/s/GPU",
            cells=counts(rates),
            meaning="tokens/s/GPU measured",
            drop=4,
        ),
        *([figure_column(figures.MEMORY, calibrated)] if pareto else []),
    ]
    title = "Step time by the cost model alone, calibrated by runs, and measured"
    print_columns(console, columns, title=title, bold_first=shown[0].rank == 1)
    print_unmeasured(console, [row.estimate for row in shown])


def _search_cost_lines(result: TuneResult) -> list[str]:
    """Return lines with the cost of the search, why it stopped, and the next command to run."""
    search = result.search
    state = None if result.answer is None else get_verdict(result.answer).state
    spent, budget = format_device_time(search.gpu_seconds), search.budget_gpu_seconds
    if budget is not None and search.gpu_seconds > budget:
        spent += f" (budget {format_device_time(budget)}; runs that have started are not cut off)"
    elif budget is not None:
        spent += f" of a budget of {format_device_time(budget)}"
    grid = ""
    if search.grid_gpu_seconds:
        share = search.gpu_seconds / search.grid_gpu_seconds
        grid = (
            f", {share:.0%} of the predicted cost of running all {result.space.feasible:,} "
            "feasible layouts"
        )
    reason = stop_reason(search.stopped_because, state)
    lines = [
        f"Search {search.id} {search.state} after "
        f"{format_count(search.profile_runs, 'profile run')} "
        f"and {spent}{grid}: {reason}."
    ]
    if search.queue_s >= MIN_SHOWN_S:
        lines.append(f"Jobs also waited {format_duration(search.queue_s)} for devices.")
    if search.reduced_runs:
        reduced = format_count(search.reduced_runs, "run")
        lines.append(f"{reduced} reduced; ~ marks a step time that a reduced run implies.")
    if search.expected_gain_fraction is not None:
        lines.append(f"Expected gain of four further runs: {search.expected_gain_fraction:.1%}.")
    if search.state == "paused":
        lines.append(f"Next: `hp-tool tune --resume {search.id}` continues it.")
    elif result.recommendations:
        tool = "megatron-lm" if isinstance(result.recommendations[0], Recommendation) else "vllm"
        lines.append(
            f"Next: `hp-tool report {search.id}` writes a page, `hp-tool export {search.id} "
            f"--format {tool}` the flags."
        )
    return lines
