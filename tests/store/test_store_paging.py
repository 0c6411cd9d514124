"""Cursors: each belongs to the list, order and filters of the page that answered it, and none
reaches the database unread.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.ports import Store
from hp_tool.domain.records import Paging
from hp_tool.errors import InputError
from hp_tool.store import SqlStore
from hp_tool.store.engine import create_engine
from hp_tool.store.tables import searches


def test_a_cursor_is_its_own_lists(
    store: Store, new_measurement: Callable[..., NewMeasurement]
) -> None:
    for _ in range(3):
        store.create_search(query={}, owner="ada")
        store.add_measurement(measurement=new_measurement())
    page = store.list_searches(owner="ada", limit=2)
    assert page.next_cursor is not None
    since = page.items[-1].created_at
    assert (
        len(store.list_searches(owner="ada", limit=1, cursor=page.next_cursor).items) == 1
    )  # pages may differ in length
    others: list[Callable[[], object]] = [
        lambda: store.list_searches(cursor=page.next_cursor),
        lambda: store.list_searches(owner="bob", cursor=page.next_cursor),
        lambda: store.list_searches(owner="ada", oldest_first=True, cursor=page.next_cursor),
        lambda: store.list_searches(owner="ada", since=since, cursor=page.next_cursor),
        lambda: store.list_searches(owner="ada", until=since, cursor=page.next_cursor),
        lambda: store.measurements(owner="ada", cursor=page.next_cursor),
        lambda: store.list_calibrations(cursor=page.next_cursor),
    ]
    for other in others:
        with pytest.raises(InputError, match="other filters or order") as caught:
            other()
        assert caught.value.field == "cursor"


@pytest.mark.parametrize(
    "text",
    [
        "0001-01-01T00:00:00+23:59|a|b",
        "2026-01-01T00:00:00+00:00|a\0b|c",
        "2026-01-01T00:00:00|a|b",
    ],
)
def test_a_forged_cursor_reaches_no_database(store: Store, text: str) -> None:
    with pytest.raises(InputError, match="is not a"):
        store.list_searches(cursor=base64.urlsafe_b64encode(text.encode()).decode())


@pytest.mark.parametrize("oldest_first", [False, True])
def test_rows_of_one_instant_are_each_on_one_page(
    store: SqlStore, store_url: str, oldest_first: bool
) -> None:
    """A clock that stands still, or many writers: rows created at the same time follow each other
    by their id.
    """
    ids = sorted(store.create_search(query={}).id for _ in range(5))
    engine = create_engine(store_url)
    with engine.begin() as connection:
        for position in (3, 0, 4, 1, 2):  # PostgreSQL writes a changed row anew, behind the others
            changed = sa.update(searches).where(searches.c.id == ids[position])
            connection.execute(changed.values(created_at=datetime(2026, 1, 1, tzinfo=UTC)))
    engine.dispose()
    listed: list[str] = []
    paging: Paging = {"oldest_first": oldest_first}
    while True:
        page = store.list_searches(limit=2, **paging)
        listed += [search.id for search in page.items]
        if page.next_cursor is None:
            break
        paging["cursor"] = page.next_cursor
    assert listed == sorted(ids, reverse=not oldest_first)
