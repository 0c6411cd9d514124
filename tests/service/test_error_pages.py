"""What a browser gets where a program gets problem+json: a page that says what is wrong, and a way
back.
"""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.errors import StoreError
from hp_tool.store import SqlStore
from tests.service.coordinator import claim, finish

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SITE = "http://127.0.0.1:8000"


@pytest.mark.parametrize("path", ["/nowhere", "/searches/none", "/models/%3Cb%3E"])
def test_an_unknown_address_is_a_page_with_a_way_back(http: TestClient, path: str) -> None:
    answer = http.get(path, headers=BROWSER | {"Referer": f"{SITE}/gpus?a=1"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert (
        "<h1>Not found</h1>" in answer.text
        and 'href="/gpus?a=1"' in answer.text
        and "<b>" not in answer.text
    )
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    for away in ("https://evil.example/x", f"{SITE}{path}", ""):
        assert (
            'class="button primary" href="/"'
            in http.get(path, headers=BROWSER | {"Referer": away}).text
        )


def test_programs_keep_json(http: TestClient) -> None:
    for path, headers in (
        ("/searches/none", {}),
        ("/searches/none.json", BROWSER),
        ("/v1/searches/none", BROWSER),
    ):
        answer = http.get(path, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_an_action_too_late_is_a_page(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    finish(store, claim(store, search))
    headers = BROWSER | {"Referer": f"{SITE}/searches/{search}"}
    answer = http.post(f"/searches/{search}/cancel", headers=headers)
    assert answer.status_code == 409 and "<h1>Not possible now</h1>" in answer.text
    assert f'href="/searches/{search}"' in answer.text


def test_an_absent_database_is_a_page(
    http: TestClient, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(**_: object) -> None:
        raise StoreError("database at db.example does not answer")

    monkeypatch.setattr(store, "list_searches", away)
    answer = http.get("/", headers=BROWSER)
    assert (
        answer.status_code == 503
        and "The database is unavailable" in answer.text
        and "db.example" in answer.text
    )


def test_what_was_done_is_confirmed(http: TestClient) -> None:
    spec = "num_hidden_layers: 4\nhidden_size: 128\nnum_attention_heads: 4\nvocab_size: 1024"
    added = http.post("/models", data={"name": "mine", "spec": spec})
    assert added.status_code == 200 and 'role="status">Added.' in added.text
    assert 'role="status">Learned' in http.post("/calibration").text
    assert 'role="status"' not in http.get("/models?done=<b>").text
