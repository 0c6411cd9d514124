"""How a search goes on, on standard error: a bar over its budget, and a line for every run that ended."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.units import duration


class SearchProgress:
    """Listens to a search's events, this process's own or a server's."""

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
            self._console.print(f"interrupted; hp-tool tune --resume {self._search_id} goes on", highlight=False)

    def on_event(self, kind: str, payload: dict[str, Any]) -> None:
        """One event of a search; kinds that say nothing about progress are passed over."""
        if kind == "started":
            done, self._search_id = payload.get("profile_runs", 0), payload["search_id"]
            self._progress.update(self._task, total=payload["budget_runs"], completed=done, description="choosing")
            self._console.print(f"search {payload['search_id']}", highlight=False)
        elif kind in ("run_started", "proposed"):
            self._progress.update(self._task, description=f"running {_label(payload)}")
        elif kind == "run_finished":
            self._progress.update(self._task, advance=1, description="choosing")
            self._console.print(f"run {payload['number']}: {_label(payload)}: {_outcome(payload)}", highlight=False)
        elif kind == "run_abandoned":
            self._console.print(f"run {payload['number']}: given back: {payload['cause']}", highlight=False)
        elif kind == "waiting":
            self._console.print(f"waiting for the runs folder: {payload['waiting_for']}", highlight=False)
        elif kind == "run":  # a server's word for what the run_* kinds say here
            self._on_server_run(payload)

    def _on_server_run(self, payload: dict[str, Any]) -> None:
        if payload["state"] == "finished":
            self._progress.update(self._task, advance=1, description="choosing")
            self._console.print(f"run {payload['number']}: {_outcome(payload)}", highlight=False)


def _label(payload: dict[str, Any]) -> str:
    from hp_tool.queries.schema import parse
    from hp_tool.render.words import arithmetic

    return arithmetic(parse(ParallelConfig, payload["parallel"]))


def _outcome(payload: dict[str, Any]) -> str:
    if payload.get("status") != "ok":
        return f"{payload.get('status')}: {payload.get('cause') or 'see the log'}"
    predicted = payload.get("predicted", {}).get("calibrated_step_s")
    before = f"predicted {duration(predicted)}, " if predicted else ""
    how = "a reduced run implies" if payload.get("reduced") else "measured"
    return f"{before}{how} {duration(payload['step_s'])}"
