"""From stored records to what the searches' pages show."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from hp_tool.domain.ports import Store
from hp_tool.domain.records import JsonObject, RunRecord, SearchRecord, SearchState
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.exchange.exports import TRAINING
from hp_tool.formats.engines import ENGINES
from service.api.search_results import recommended
from service.api.views import SearchView
from service.dashboard.best import leading_best, recommended_best
from service.dashboard.contexts import Action, SearchPage, Tone
from service.dashboard.serving_runs import quantity, serves

SEARCH_TONES: dict[SearchState, Tone] = {
    SearchState.QUEUED: "",
    SearchState.RUNNING: "busy",
    SearchState.PAUSED: "warn",
    SearchState.SUCCEEDED: "good",
    SearchState.FAILED: "bad",
    SearchState.CANCELLED: "",
}


def stored_search_page(*, record: SearchRecord, store: Store) -> SearchPage:
    """One search's context."""
    best_run = record.progress.get("best_run_id")
    leading = store.get_run(search_id=record.id, run_id=best_run) if best_run else None
    return search_page(view=SearchView.of(record), best_run=leading, recommended=recommended(record))


def search_page(
    *, view: SearchView, best_run: RunRecord | None, recommended: Recommendation | ServingRecommendation | None
) -> SearchPage:
    """One search's context; `recommended` is the first row of its result, `best_run` the leader while there is none."""
    account = view.progress | (view.summary or {})
    best = None
    if recommended is not None:
        best = recommended_best(recommended, query=view.query)
    elif best_run is not None:
        best = leading_best(best_run, query=view.query)
    return SearchPage(
        id=view.id,
        kind="inference" if serves(view.query) else "training",
        quantity=quantity(view.query),
        title=subject(view.query),
        json_href=f"/searches/{view.id}.json",
        trials_href=f"/searches/{view.id}/trials.json",
        logs_href=f"/searches/{view.id}/logs/",
        export_href=f"/searches/{view.id}/export" if best else None,
        export_formats=tuple(ENGINES if serves(view.query) else TRAINING),
        events_href=None if view.state.ended else f"/v1/searches/{view.id}/events",
        state=view.state,
        tone=SEARCH_TONES[view.state],
        ended=view.state.ended,
        requested=view.requested,
        actions=_actions(view),
        error=view.error,
        best=best,
        profile_runs=account.get("profile_runs", 0),
        budget_runs=budget_runs_of(view.query),
        seconds_left=seconds_left(view),
        gpu_seconds=account.get("gpu_seconds", 0.0),
        grid_gpu_seconds=account.get("grid_gpu_seconds"),
        expected_gain_fraction=account.get("expected_gain_fraction"),
        waiting_for=None if view.state.ended else account.get("waiting_for"),
        stopped_because=view.stopped_because.replace("_", " ") if view.stopped_because else None,
        worker=view.worker,
        created_at=view.created_at,
        finished_at=view.finished_at,
        query_text=json.dumps(view.query, indent=2, ensure_ascii=False),
    )


def subject(query: JsonObject) -> str:
    """Model on cluster, in the query's own words."""
    model, cluster = query.get("model"), query.get("cluster")
    name = model.get("name") or "own model" if isinstance(model, dict) else str(model)
    if not isinstance(cluster, dict):
        return f"{name} on {cluster}"
    gpu = cluster.get("gpu") or cluster.get("node_type") or "GPU"
    number = cluster.get("num_gpus")
    where = gpu.get("name", "own GPU") if isinstance(gpu, dict) else str(gpu)
    return f"{name} on {number} x {where}" if number else f"{name} on {where}"


def seconds_left(view: SearchView, *, now: datetime | None = None) -> float | None:
    """At most: the pace so far, times what is left of the budget that runs out first."""
    done, spent = view.progress.get("profile_runs", 0), view.progress.get("gpu_seconds", 0.0)
    if view.state is not SearchState.RUNNING or view.started_at is None or not done:
        return None
    settings = view.query.get("search") or {}
    used: float = done / max(done, budget_runs_of(view.query))
    if settings.get("budget_gpu_seconds"):
        used = max(used, min(1.0, spent / settings["budget_gpu_seconds"]))
    elapsed = ((now or datetime.now(UTC)) - view.started_at).total_seconds()
    return elapsed * (1 - used) / used


def _actions(view: SearchView) -> tuple[Action, ...]:
    cancel = Action(label="Cancel", href=f"/searches/{view.id}/cancel", tone="danger")
    pause = Action(label="Pause", href=f"/searches/{view.id}/pause")
    resume = Action(label="Resume", href=f"/searches/{view.id}/resume", tone="primary")
    again = Action(label="Run again", href=f"/searches/{view.id}/clone")
    match view.state:
        case SearchState.QUEUED | SearchState.RUNNING:
            return (resume if view.requested == "pause" else pause, cancel)
        case SearchState.PAUSED:
            return (resume, cancel)
        case SearchState.FAILED:
            return (resume, again, cancel)
        case _:
            return (again,)


def budget_runs_of(query: dict[str, Any]) -> int:
    return int((query.get("search") or {}).get("budget_runs") or 0)
