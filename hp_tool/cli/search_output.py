"""A search on the terminal: its progress on standard error, and its result as a table."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from hp_tool.cli.tables import print_nearest, print_table, print_tuned_serving, wide_console
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.render.words import arithmetic, configuration_cells
from hp_tool.tuning.plan import PlannedRun, SearchPlan
from hp_tool.tuning.result import TuneResult
from hp_tool.units import SECONDS_PER_HOUR, counted, duration, gib

MAX_ROWS = 10
"""Rows that were not measured are left out after this many."""


WORTH_TELLING_S = 1.0
"""A shorter wait of jobs is not told."""


class SearchProgress:
    """A bar over the budget and a line for every finished run, from the events of a search in this process or on a server."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=self._console)
        self._task: TaskID = self._progress.add_task("starting", total=None)
        self._search_id: str | None = None

    def __enter__(self) -> SearchProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        if kind is KeyboardInterrupt and self._search_id is not None:
            self._print(f"interrupted; continue with: hp-tool tune --resume {self._search_id}")

    def on_event(self, kind: str, payload: dict[str, Any]) -> None:
        """Show one event of a search; events without progress are ignored."""
        match kind:
            case "started":
                done, self._search_id = payload.get("profile_runs", 0), payload["search_id"]
                self._progress.update(self._task, total=payload["budget_runs"], completed=done, description="choosing")
                self._print(f"search {payload['search_id']}")
            case "run_started" | "proposed":
                self._progress.update(self._task, description=f"running {_label(payload)}")
            case "run_finished":
                self._finish(f"run {payload['number']}: {_label(payload)}: {_outcome(payload)}")
            case "run" if payload["state"] == "finished":  # a server's event
                self._finish(f"run {payload['number']}: {_outcome(payload)}")
            case "run_abandoned":
                self._print(f"run {payload['number']}: given up: {payload['cause']}")
            case "pending":
                self._progress.update(self._task, description=f"pending: {pending_words(payload)}")
            case "preflight":
                slow = [f"{each['kind']} {each['name']} ({each['slowdown']:.2f} times its peers)" for each in payload["slow"]]
                self._print(f"preflight: {'; '.join(slow) or payload['cause'] or 'no node, device or link lags'}")
            case "waiting":
                self._print(f"waiting for the runs folder: {payload['waiting_for']}")

    def _finish(self, line: str) -> None:
        self._progress.update(self._task, advance=1, description="choosing")
        self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False)


def pending_words(pending: dict[str, Any]) -> str:
    """Why a job waits for devices, and until when."""
    starts_at = pending.get("starts_at")
    return (pending.get("reason") or "no reason given") + (f", expected to start at {starts_at}" if starts_at else "")


def _label(payload: dict[str, Any]) -> str:
    from hp_tool.queries.schema import parse

    return arithmetic(parse(ParallelConfig, payload["parallel"]))


def _outcome(payload: dict[str, Any]) -> str:
    if payload.get("status") != "ok":
        return f"{payload.get('status')}: {payload.get('cause') or 'see the log'}"
    predicted = payload.get("predicted", {}).get("calibrated_step_s")
    before = f"predicted {duration(predicted)}, " if predicted else ""
    how = "a reduced run implies" if payload.get("reduced") else "measured"
    return f"{before}{how} {duration(payload['step_s'])}"


def print_result(result: TuneResult, *, pareto: bool = False) -> None:
    """The ranking (or the Pareto-optimal configurations), the best configuration, and what the search cost."""
    console = wide_console()
    trained = [row for row in result.recommendations if isinstance(row, Recommendation)]
    served = [row for row in result.recommendations if isinstance(row, ServingRecommendation)]
    if result.error is not None:
        console.print(f"[red]{result.error['message']}[/red]")
    if served:
        print_tuned_serving(console, served)
    else:
        _print_trained(console, list(result.pareto) if pareto else trained, pareto=pareto)
    if trained:
        best, source = trained[0], "predicted, not measured"
        if best.measurement is not None:
            source = "measured" if best.measurement.fidelity.is_whole else "implied by a reduced run"
        console.print(f"best: {arithmetic(best.parallel)} ({source})", style="bold", highlight=False)
    print_nearest(console, result.nearest_misses)
    for line in _account(result):
        console.print(line, highlight=False)


def plan_lines(plan: SearchPlan) -> list[str]:
    """The bill of a search, in lines."""
    lines = [f"{'first run':12}  {_planned(plan.first)}"]
    if plan.confirmation is not None:
        lines.append(f"{'confirmation':12}  {_planned(plan.confirmation)}")
    known = plan.cost is not None and plan.most_cost is not None
    whole, most = (f", ${plan.cost:,.0f}", f", ${plan.most_cost:,.0f}") if known else ("", "")
    return [
        *lines,
        f"{'the search':12}  at most {plan.runs} runs ({plan.stopped_by}), {duration(plan.wall_s)} without waiting for devices"
        f", {_device_time(plan.gpu_seconds)}{whole}",
        f"{'at worst':12}  {_device_time(plan.most_gpu_seconds)}{most}, if every run takes all of its time limit",
    ]


def _planned(run: PlannedRun) -> str:
    fidelity = run.fidelity
    kept = {"layers": fidelity.num_hidden_layers, "replicas": fidelity.data_parallel_size}
    kept |= {"micro-batches": fidelity.num_micro_batches}
    what = ", ".join(f"{number} {name}" for name, number in kept.items() if number is not None)
    return (
        f"{arithmetic(run.parallel)}, {f'reduced to {what}' if what else 'whole'}: {counted(run.num_nodes, 'node')}, "
        f"{counted(run.num_gpus, 'GPU')}, {duration(run.wall_s)} (limit {duration(run.time_limit_s)}), "
        f"step {duration(run.step_s)}, {_device_time(run.gpu_seconds)}"
    )


def _print_trained(console: Console, ranked: Sequence[Recommendation], *, pareto: bool) -> None:
    """Step times predicted before, predicted after calibration and measured, side by side."""
    shown = [row for row in ranked if pareto or row.measurement is not None or row.rank <= MAX_ROWS]
    heads, configurations = configuration_cells([row.parallel for row in shown])
    figures = ("before", "after", "90 % interval", "measured", "tokens/s/GPU", *(("memory",) if pareto else ()))
    rows = [
        (str(row.rank), *configuration, *_figures(row)[: len(figures)])
        for row, configuration in zip(shown, configurations, strict=True)
    ]
    title = "step time: predicted before, after calibration, and measured"
    best_first = bool(shown) and shown[0].rank == 1
    print_table(console, ("rank", *heads, *figures), rows, title=title, bold_first=best_first)


def _account(result: TuneResult) -> list[str]:
    """What the search cost and why it ended, in lines."""
    search = result.search
    grid = ""
    if search.grid_gpu_seconds:
        share = search.gpu_seconds / search.grid_gpu_seconds
        grid = f"; all {result.space.feasible:,} feasible ones would have taken {_device_time(search.grid_gpu_seconds)}"
        grid += f" ({share:.0%} of it was spent)"
    lines = [
        f"search {search.id} {search.state}: {search.profile_runs} profile runs, {_device_time(search.gpu_seconds)}"
        f"{grid}; stopped because: {search.stopped_because}"
    ]
    if search.queue_s >= WORTH_TELLING_S:
        lines.append(f"its jobs waited {duration(search.queue_s)} for devices, which is not counted")
    if search.reduced_runs:
        lines.append(f"{search.reduced_runs} of the runs were reduced; ~ marks a step time that a reduced run implies")
    if search.expected_gain_fraction is not None:
        lines.append(f"expected further gain of another run: {search.expected_gain_fraction:.1%}")
    if search.state == "paused":
        lines.append(f"continue with: hp-tool tune --resume {search.id}")
    return lines


def _figures(row: Recommendation) -> list[str]:
    """Step times, throughput, and the memory of the fullest device after calibration."""
    before, measured, after = row.estimate.time, row.measurement, row.calibrated_estimate
    after_time, memory, intervals = (after.time, after.memory, after.intervals) if after else (None, None, None)
    step_s = measured.objective_s if measured is not None else None
    whole = measured is not None and measured.fidelity.is_whole
    rate = measured.tokens_per_second_per_gpu if measured is not None and whole else None
    return [
        duration(before.step_s) if before else "-",
        duration(after_time.step_s) if after_time else "-",
        " to ".join(duration(end) for end in intervals.step_s) if intervals else "-",
        f"{'' if whole else '~'}{duration(step_s)}" if step_s is not None else "-",
        f"{rate:,.0f}" if rate is not None else "-",
        gib(memory.total_bytes) if memory else "-",
    ]


def _device_time(gpu_seconds: float) -> str:
    """Device time for people: in seconds below an hour, else in hours."""
    if gpu_seconds < SECONDS_PER_HOUR:
        return f"{gpu_seconds:,.0f} GPU-seconds"
    return f"{gpu_seconds / SECONDS_PER_HOUR:,.1f} GPU-hours"
