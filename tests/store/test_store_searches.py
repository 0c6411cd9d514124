"""What the port promises of searches: creation, reading, lists, what it refuses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError, InputError, NotFoundError
from tests.store.acting import QUERY, claimed


def test_a_new_search_waits_in_the_queue_with_its_query(store: Store) -> None:
    made = store.create_search(query=QUERY, owner="ada", priority=3)
    assert store.get_search(search_id=made.id) == made
    assert (made.state, made.query, made.owner, made.priority, made.lease) == (
        SearchState.QUEUED,
        QUERY,
        "ada",
        3,
        None,
    )
    assert abs(made.created_at - datetime.now(UTC)) < timedelta(seconds=10)


def test_an_unknown_search_is_not_found(store: Store) -> None:
    for read in (
        store.get_search,
        store.runs,
        store.events,
        store.request_cancel,
        store.resume_search,
    ):
        with pytest.raises(NotFoundError, match="No search 'nope'"):
            read(search_id="nope")


def test_pages_cover_all_searches_once_newest_first(store: Store) -> None:
    made = [store.create_search(query=QUERY, owner="ada").id for _ in range(7)]
    store.create_search(query=QUERY, owner="bob")
    seen, cursor = [], None
    while True:
        page = store.list_searches(owner="ada", limit=3, cursor=cursor)
        seen += [search.id for search in page.items]
        if (cursor := page.next_cursor) is None:
            break
    assert seen == made[::-1]


@pytest.mark.parametrize("cursor", ["", "nonsense", "MjAyNg", "ÿ"])
def test_a_made_up_cursor_is_bad_input(store: Store, cursor: str) -> None:
    with pytest.raises(InputError) as caught:
        store.list_searches(cursor=cursor)
    assert caught.value.field == "cursor"


@pytest.mark.parametrize("limit", [0, -1, 10**9])
def test_limits_are_bounded(store: Store, limit: int) -> None:
    with pytest.raises(InputError):
        store.list_searches(limit=limit)


def test_lists_filter_by_state_and_leave_results_out(store: Store) -> None:
    lease = claimed(store)
    store.create_search(query=QUERY)
    store.finish_search(lease=lease, state=SearchState.SUCCEEDED, result={"recommendations": []})
    (ended,) = store.list_searches(state=SearchState.SUCCEEDED).items
    assert (ended.id, ended.result) == (lease.search_id, None)
    assert store.get_search(search_id=lease.search_id).result == {"recommendations": []}
    counts = store.usage().searches
    assert counts == {
        state: int(state in (SearchState.QUEUED, SearchState.SUCCEEDED)) for state in SearchState
    }


def test_lists_filter_by_what_is_asked_for(store: Store) -> None:
    own = {"name": "mine" * 60, "num_hidden_layers": 2}
    asked = (
        QUERY | {"kind": "training"},
        QUERY | {"kind": "inference"},
        QUERY | {"kind": "training", "model": own},
        {},
    )
    a, b, c, d = (store.create_search(query=query).id for query in asked)

    def found(**filters: str) -> list[str]:
        return [search.id for search in store.list_searches(**filters).items]

    assert found(kind="training") == [c, a] and found(kind="inference") == [b]
    assert found(model="gpt-tiny") == [b, a] and found(model="gpt") == []
    assert found(model="mine" * 50) == [c]  # a name is kept as far as the column goes
    assert found(model="gpt-tiny", kind="training") == [a]
    assert d in found()


def test_an_idempotency_key_makes_one_search(store: Store) -> None:
    first = store.create_search(query=QUERY, owner="ada", idempotency_key="k")
    assert (
        store.create_search(query=dict(reversed(QUERY.items())), owner="ada", idempotency_key="k")
        == first
    )
    assert store.create_search(query=QUERY, owner="bob", idempotency_key="k").id != first.id
    with pytest.raises(ConflictError):
        store.create_search(query=QUERY | {"model": "other"}, owner="ada", idempotency_key="k")
    with pytest.raises(ConflictError):
        store.create_search(query=QUERY, priority=1, owner="ada", idempotency_key="k")
    assert store.usage().searches[SearchState.QUEUED] == 2


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_know_is_refused(store: Store, number: float) -> None:
    with pytest.raises(InputError, match="query"):
        store.create_search(query={"training": {"x": [number]}})
    assert store.list_searches().items == ()


@pytest.mark.parametrize("owner", ["x" * 201, "a\0b"])
def test_text_that_a_column_cannot_hold_is_refused(store: Store, owner: str) -> None:
    with pytest.raises(InputError) as caught:
        store.create_search(query=QUERY, owner=owner)
    assert caught.value.field == "owner"
