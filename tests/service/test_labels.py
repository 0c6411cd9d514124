"""Names, tags and notes: given over HTTP, by the page and by the command, and found again by their
words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.store import SqlStore


def _found(http: TestClient, words: str) -> list[str]:
    answer = http.get("/v1/searches", params={"words": words})
    assert answer.status_code == 200, answer.text
    return [each["id"] for each in answer.json()["items"]]


def test_a_search_is_found_by_every_word_of_its_label(
    http: TestClient, query: dict[str, Any]
) -> None:
    first, second = (http.post("/v1/searches", json=query).json()["id"] for _ in range(2))
    label = {"name": "Llama baseline", "tags": ["h100", "week-47"], "note": "before the new Kernel"}
    view = http.put(f"/v1/searches/{first}/label", json=label).json()
    assert view["label"] == label
    http.put(f"/v1/searches/{second}/label", json={"name": "llama, second try"})
    assert _found(http, "LLAMA") == [second, first]
    assert _found(http, "llama kernel") == [first] == _found(http, "H100 47")
    assert _found(http, "llam") == [] == _found(http, "llama nothing")
    http.put(f"/v1/searches/{first}/label", json={"note": "renamed"})
    assert _found(http, "baseline") == [] and _found(http, "renamed") == [first]
    page = http.get("/v1/searches", params={"words": "renamed", "limit": 1}).json()
    assert page["next_cursor"] is None
    cursor = http.get("/v1/searches", params={"limit": 1}).json()["next_cursor"]
    assert (
        http.get("/v1/searches", params={"words": "llama", "cursor": cursor}).json()["field"]
        == "cursor"
    )


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": "x" * 201}, "name"),
        ({"tags": ["a"] * 21}, "tags"),
        ({"tags": [""]}, "tags.0"),
        ({"nme": "x"}, "nme"),
    ],
)
def test_labels_are_bounded(
    http: TestClient, query: dict[str, Any], wrong: dict[str, Any], field: str
) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    answer = http.put(f"/v1/searches/{search}/label", json=wrong)
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text


def test_the_page_labels_lists_and_reports(http: TestClient, query: dict[str, Any]) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    form = {"name": "Nightly <b>", "tags": "one, two", "note": "why"}
    answer = http.post(f"/searches/{search}/label", data=form, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        f"/searches/{search}?done=changed",
    )
    for page in (
        http.get(f"/searches/{search}").text,
        http.get("/searches", params={"words": "two"}).text,
    ):
        assert "Nightly &lt;b&gt;" in page and "two" in page
    assert "No matching searches" in http.get("/searches", params={"words": "three"}).text
    report = http.get(f"/searches/{search}/report")
    assert (
        report.headers["content-disposition"]
        == f'attachment; filename="nightly-b-{search[:8]}.html"'
    )
    assert "<script" in report.text and search in report.text


def test_the_command_and_the_index(store: SqlStore, query: dict[str, Any], tmp_path: Path) -> None:
    search = store.create_search(query=query).id
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    arguments = [
        "label",
        search,
        "--name",
        "from a terminal",
        "--tag",
        "a",
        "--tag",
        "b",
        "--database-url",
        url,
    ]
    assert CliRunner().invoke(build(), arguments).exit_code == 0
    assert store.get_search(search_id=search).label.tags == ("a", "b")
    with store._reading() as connection:
        looked_up = (
            "SELECT id FROM hp_searches WHERE id IN (SELECT search_id FROM hp_search_words "
            "WHERE word = 'a')"
        )
        plan = str(
            connection.execute(
                sa.text(f"EXPLAIN QUERY PLAN {looked_up} ORDER BY created_at DESC, id DESC")
            ).all()
        )
    assert "SEARCH hp_search_words" in plan and "SCAN hp_searches" not in plan
