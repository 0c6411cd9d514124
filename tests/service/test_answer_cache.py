"""Answers that are kept: the same bytes, for as long as what they rest on stands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool import catalog
from hp_tool.store import SqlStore
from service.http import answer_cache
from service.http.answer_cache import ENTRY_OVERHEAD_BYTES, AnswerCache
from tests.service.test_registrations import MODEL


def served(http: TestClient) -> dict[str, float]:
    """How often an answer was kept or made, by the metrics."""
    lines = [
        line
        for line in http.get("/metrics").text.splitlines()
        if line.startswith("hp_answers_total{")
    ]
    counts = {"hit": 0.0, "miss": 0.0}
    for line in lines:
        counts["hit" if 'cache="hit"' in line else "miss"] += float(line.rsplit(" ", 1)[1])
    return counts


@pytest.mark.parametrize(
    "path", ["/v1/estimates", "/v1/recommendations?top=3", "/v1/estimates?calibration=false"]
)
def test_the_same_query_is_answered_once(
    http: TestClient, query: dict[str, Any], path: str
) -> None:
    first, second = (http.post(path, json=query) for _ in range(2))
    assert first.status_code == second.status_code == 200, first.text
    assert first.content == second.content
    assert {**first.headers, "x-request-id": ""} == {**second.headers, "x-request-id": ""}
    assert served(http) == {"hit": 1, "miss": 1}
    assert http.post(path, json=query | {"id": "other"}).json()["id"] == "other"
    assert served(http) == {"hit": 1, "miss": 2}


def test_errors_are_not_kept(http: TestClient, query: dict[str, Any]) -> None:
    for _ in range(2):
        assert http.post("/v1/estimates", json=query | {"model": "nope"}).status_code == 422
    assert served(http) == {"hit": 0, "miss": 2}


def test_a_new_calibration_makes_a_new_answer(http: TestClient, query: dict[str, Any]) -> None:
    query = query | {"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2}}
    assert http.post("/v1/estimates", json=query).json()["calibrated_estimate"] is None
    for step_s in (0.5, 0.55):
        report = {"query": query, "parallel": {}, "measurement": {"status": "ok", "step_s": step_s}}
        assert http.post("/v1/measurements", json=report).status_code == 201
    assert http.post("/v1/calibrations").json()["items"] != []
    calibrated = http.post("/v1/estimates", json=query).json()["calibrated_estimate"]
    assert calibrated is not None
    assert http.post("/v1/estimates", json=query).json()["calibrated_estimate"] == calibrated
    assert served(http)["hit"] == 1


def test_a_changed_file_of_the_catalogue_makes_a_new_answer(
    http: TestClient, query: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(answer_cache, "CHECK_EVERY_S", 0.0)
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    file = tmp_path / "models" / "house.json"
    file.parent.mkdir()

    def weights(layers: int) -> float:
        file.write_text(json.dumps({"name": "house", **MODEL, "num_hidden_layers": layers}))
        os.utime(file, ns=(layers, layers))
        bytes_: float = http.post("/v1/estimates", json=query | {"model": "house"}).json()[
            "estimate"
        ]["memory"]["weights_bytes"]
        return bytes_

    try:
        assert weights(2) < weights(4)
    finally:
        monkeypatch.undo()
        catalog.revision()


def test_what_names_a_registration_is_answered_anew(
    http: TestClient, query: dict[str, Any]
) -> None:
    weights = []
    for layers in (2, 4):
        assert (
            http.post(
                "/v1/models", json={"name": "mine", "spec": MODEL | {"num_hidden_layers": layers}}
            ).status_code
            == 201
        )
        answer = http.post("/v1/estimates", json=query | {"model": "mine"}).json()
        weights.append(answer["estimate"]["memory"]["weights_bytes"])
    assert weights[0] < weights[1]


def test_the_longest_unasked_make_room() -> None:
    import asyncio

    cache = AnswerCache(max_bytes=20 + 2 * ENTRY_OVERHEAD_BYTES)
    keys = [(None, "/v1/estimates", b"", bytes([number])) for number in range(3)]

    async def ask(number: int) -> bytes | None:
        return await cache.get(keys[number])

    async def scenario() -> list[bytes | None]:
        cache.put(keys[0], b"0123456789", learnt=[])
        cache.put(keys[1], b"0123456789", learnt=[])
        await ask(0)
        cache.put(keys[2], b"x", learnt=[])
        return [await ask(number) for number in range(3)]

    assert asyncio.run(scenario()) == [b"0123456789", None, b"x"]


@pytest.mark.parametrize("path", ["/v1/gpus", "/v1/searches", "/v1/models/gpt-22b"])
def test_an_etag_saves_the_answer(
    http: TestClient, store: SqlStore, query: dict[str, Any], path: str
) -> None:
    first = http.get(path)
    tag = first.headers["etag"]
    for known in (tag, f'"x", W/{tag}', "*"):
        again = http.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get(path, headers={"If-None-Match": '"x"'}).content == first.content
    if path == "/v1/searches":
        store.create_search(query=query)
        assert http.get(path, headers={"If-None-Match": tag}).status_code == 200
    assert "etag" not in http.get("/v1/keys").headers
