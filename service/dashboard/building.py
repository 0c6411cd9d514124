"""From the API's views to what a page shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from hp_tool import schema
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import SearchState
from hp_tool.domain.result import Recommendation
from service.api.views import PageView, SearchView, TrialView
from service.dashboard.contexts import Action, Best, SearchesPage, SearchPage, SearchRow, Tone, TrialRow
from service.dashboard.formats import arithmetic, details

SEARCH_TONES: dict[SearchState, Tone] = {
    SearchState.QUEUED: "",
    SearchState.RUNNING: "busy",
    SearchState.PAUSED: "warn",
    SearchState.SUCCEEDED: "good",
    SearchState.FAILED: "bad",
    SearchState.CANCELLED: "",
}
TRIAL_TONES: dict[str, Tone] = {
    "intended": "",
    "submitted": "busy",
    "abandoned": "",
    "ok": "good",
    "oom": "warn",
    "timeout": "warn",
    "crashed": "bad",
    "preempted": "",
}


def searches_page(*, page: PageView[SearchView], state: SearchState | None, server: str) -> SearchesPage:
    """The list's context."""
    kept = {"state": state} if state else {}
    return SearchesPage(
        title="Searches",
        json_href=_link("/searches.json", kept),
        server=server,
        states=tuple(SearchState),
        state=state,
        rows=tuple(_search_row(view) for view in page.items),
        next_href=_link("/", {**kept, "cursor": page.next_cursor}) if page.next_cursor else None,
    )


def search_page(*, view: SearchView, trials: Sequence[TrialView], recommended: Recommendation | None) -> SearchPage:
    """One search's context; `recommended` is its result's first row, once there is a result."""
    best = best_of(trials)
    account = view.summary or view.progress
    return SearchPage(
        id=view.id,
        title=_subject(view.query),
        json_href=f"/searches/{view.id}.json",
        events_href=None if view.state.ended else f"/v1/searches/{view.id}/events",
        state=view.state,
        tone=SEARCH_TONES[view.state],
        ended=view.state.ended,
        requested=view.requested,
        actions=_actions(view),
        error=view.error,
        best=_recommended(recommended) if recommended else _best(best) if best else None,
        profile_runs=account.get("profile_runs", 0),
        budget_runs=_budget_runs(view.query),
        gpu_seconds=account.get("gpu_seconds", 0.0),
        grid_gpu_seconds=account.get("grid_gpu_seconds"),
        stopped_because=view.stopped_because.replace("_", " ") if view.stopped_because else None,
        trials=tuple(_trial_row(trial, chosen=trial is best) for trial in trials),
        worker=view.worker,
        created_at=view.created_at,
        finished_at=view.finished_at,
        query_text=json.dumps(view.query, indent=2, ensure_ascii=False),
    )


def best_of(trials: Sequence[TrialView]) -> TrialView | None:
    """The trial with most tokens per second."""
    measured = [trial for trial in trials if _rate(trial) is not None]
    return max(measured, key=lambda trial: _rate(trial) or 0.0, default=None)


def _rate(trial: TrialView) -> float | None:
    return trial.measurement.tokens_per_second_per_gpu if trial.measurement and trial.measurement.status == "ok" else None


def _search_row(view: SearchView) -> SearchRow:
    best = view.progress.get("best_parallel")
    return SearchRow(
        short_id=view.id[:8],
        href=f"/searches/{view.id}",
        state=view.state,
        tone=SEARCH_TONES[view.state],
        subject=_subject(view.query),
        best=arithmetic(schema.parse(ParallelConfig, best)) if best else None,
        best_step_s=view.progress.get("best_step_s"),
        profile_runs=view.progress.get("profile_runs", 0),
        budget_runs=_budget_runs(view.query),
        gpu_seconds=view.progress.get("gpu_seconds", 0.0),
        created_at=view.created_at,
    )


def _recommended(row: Recommendation) -> Best:
    if row.measurement is not None:
        return _measured(row.parallel, row.measurement)
    estimate = row.calibrated_estimate or row.estimate
    return Best(
        arithmetic=arithmetic(row.parallel),
        details=details(row.parallel),
        measured=False,
        step_s=estimate.time.step_s if estimate.time else None,
        tokens_per_second_per_gpu=estimate.tokens_per_second_per_gpu,
        peak_memory_bytes=int(estimate.memory.allocated_bytes) if estimate.memory else None,
    )


def _best(trial: TrialView) -> Best:
    assert trial.measurement is not None
    return _measured(trial.parallel, trial.measurement)


def _measured(parallel: ParallelConfig, measurement: Measurement) -> Best:
    return Best(
        arithmetic=arithmetic(parallel),
        details=details(parallel),
        measured=True,
        step_s=measurement.known_step_s,
        tokens_per_second_per_gpu=measurement.tokens_per_second_per_gpu,
        peak_memory_bytes=measurement.peak_memory_bytes,
    )


def _trial_row(trial: TrialView, *, chosen: bool) -> TrialRow:
    measurement = trial.measurement
    state = measurement.status if measurement else str(trial.state)
    predicted, calibrated = trial.predicted.get("step_s"), (trial.calibrated or {}).get("step_s")
    measured = measurement.known_step_s if measurement else None
    return TrialRow(
        run_id=trial.run_id,
        number=trial.number,
        arithmetic=arithmetic(trial.parallel),
        details=details(trial.parallel),
        state=state,
        tone=TRIAL_TONES.get(state, ""),
        chosen=chosen,
        faded=state not in ("ok", "intended", "submitted"),
        predicted_step_s=predicted,
        calibrated_step_s=calibrated,
        measured_step_s=measured,
        error_before=_error(predicted, measured),
        error_after=_error(calibrated, measured),
        tokens_per_second_per_gpu=measurement.tokens_per_second_per_gpu if measurement else None,
        peak_memory_bytes=measurement.peak_memory_bytes if measurement else None,
        cause=trial.cause or (measurement.cause if measurement else None),
        log_tail=measurement.log_tail if measurement else None,
    )


def _actions(view: SearchView) -> tuple[Action, ...]:
    cancel = Action(label="Cancel", href=f"/searches/{view.id}/cancel", tone="danger")
    pause = Action(label="Pause", href=f"/searches/{view.id}/pause", tone="")
    resume = Action(label="Resume", href=f"/searches/{view.id}/resume", tone="primary")
    clone = Action(label="Run again", href=f"/searches/{view.id}/clone", tone="")
    match view.state:
        case SearchState.QUEUED | SearchState.RUNNING:
            return (resume if view.requested == "pause" else pause, cancel)
        case SearchState.PAUSED:
            return (resume, cancel)
        case SearchState.FAILED:
            return (resume, clone)
        case _:
            return (clone,)


def _subject(query: dict[str, Any]) -> str:
    """Model on cluster, in the query's own words."""
    model, cluster = query.get("model"), query.get("cluster")
    name = model.get("name") or "own model" if isinstance(model, dict) else str(model)
    if not isinstance(cluster, dict):
        return f"{name} on {cluster}"
    gpu = cluster.get("gpu") or cluster.get("node_type") or "GPU"
    number = cluster.get("num_gpus")
    where = gpu.get("name", "own GPU") if isinstance(gpu, dict) else str(gpu)
    return f"{name} on {number} x {where}" if number else f"{name} on {where}"


def _budget_runs(query: dict[str, Any]) -> int:
    return int((query.get("search") or {}).get("budget_runs") or 0)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def _link(path: str, parameters: dict[str, Any]) -> str:
    return f"{path}?{urlencode(parameters)}" if parameters else path
