"""Actions on a search that was submitted, for the API and the buttons of the pages."""

from __future__ import annotations

from enum import StrEnum

from hp_tool.domain.digests import json_digest
from hp_tool.domain.fields import check_bounds
from hp_tool.domain.ports import Store
from hp_tool.domain.query import SearchSettings
from hp_tool.domain.records import SearchRecord
from hp_tool.errors import InputError


class Action(StrEnum):
    """Actions, each the last word of a POST route."""

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    CLONE = "clone"


MEANING = {
    Action.CANCEL: "A waiting or failed search ends at once, a running one or one with open runs as soon as a worker sees it.",
    Action.PAUSE: "Nobody works on it until it is resumed; what was measured stays.",
    Action.RESUME: "Queue a paused or failed search again; its finished runs are not repeated.",
    Action.CLONE: "A new search with the same query; it runs again, informed by what is known by now.",
}


def change_budget(
    store: Store, *, search_id: str, budget_runs: int | None = None, budget_gpu_seconds: float | None = None
) -> SearchRecord:
    """The search with another budget; what is None stays as it is.

    Raises:
        InputError: a number out of range, or nothing to change.
        NotFoundError: no such search.
        ConflictError: it has ended.
    """
    if budget_runs is None and budget_gpu_seconds is None:
        raise InputError("nothing to change: give budget_runs, budget_gpu_seconds or both", field="budget_runs")
    check_bounds(SearchSettings, {"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds})
    return store.change_budget(search_id=search_id, budget_runs=budget_runs, budget_gpu_seconds=budget_gpu_seconds)


def apply_action(store: Store, *, search_id: str, action: Action, idempotency_key: str | None = None) -> SearchRecord:
    """The search after the action. A clone is the new search, or the one made earlier with the same key.

    Raises:
        NotFoundError: no such search.
        ConflictError: its state does not allow the action.
    """
    match action:
        case Action.CANCEL:
            return store.request_cancel(search_id=search_id)
        case Action.PAUSE:
            return store.request_pause(search_id=search_id)
        case Action.RESUME:
            return store.resume_search(search_id=search_id)
        case Action.CLONE:
            query = store.get_search(search_id=search_id).query
            # The digest keeps the key apart from those of submissions and of other searches' clones.
            key = None if idempotency_key is None else json_digest([search_id, idempotency_key])
            return store.create_search(query=query, idempotency_key=key)
