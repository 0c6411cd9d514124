"""A request with an idempotency key is recognised by a later edition, whose defaults differ."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.errors import ConflictError
from hp_tool.store import SqlStore

REQUEST: dict[str, Any] = {"kind": "training", "model": "m", "search": {"budget_runs": 4}}
THEN: dict[str, Any] = REQUEST | {
    "rank_by": "expected",
    "search": {"budget_runs": 4, "steps": 10},
    "stages": [{"gpu": "a", "n": 1}],
}
"""As the earlier edition expanded, stored and fingerprinted it."""
NOW: dict[str, Any] = THEN | {
    "search": {"budget_runs": 4, "steps": 20, "novelty": True},
    "stages": [{"gpu": "a", "n": 2}],
    "new": None,
}
"""As today's edition expands it: with further fields, and other defaults."""


def test_a_changed_default_does_not_make_another_request(store: SqlStore) -> None:
    first = store.create_search(query=THEN, idempotency_key="k").id
    again = store.earlier_search(request=REQUEST, expanded=NOW, idempotency_key="k")
    assert again is not None and again.id == first
    other = REQUEST | {"search": {"budget_runs": 5}}
    with pytest.raises(ConflictError):
        store.earlier_search(
            request=other,
            expanded=NOW | {"search": {"budget_runs": 5, "steps": 20}},
            idempotency_key="k",
        )
    stated = REQUEST | {"search": {"budget_runs": 4, "steps": 20}}
    with pytest.raises(ConflictError):
        store.earlier_search(request=stated, expanded=NOW, idempotency_key="k")


def test_a_budget_changed_since_does_not_make_another_request(store: SqlStore) -> None:
    request = {"kind": "training", "model": "m"}
    expanded = request | {"search": {"budget_runs": 8, "steps": 10}}
    first = store.create_search(query=expanded, idempotency_key="k").id
    store.change_budget(search_id=first, budget_runs=12)
    again = store.earlier_search(
        request=request, expanded=expanded | {"new": 1}, idempotency_key="k"
    )
    assert again is not None and again.id == first
