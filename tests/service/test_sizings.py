"""POST /v1/sizings over a socket."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from hp_tool.questions import schema
from hp_tool.questions.budgets import answer_sizing, parse_sizing
from service.client import Client

BUDGET = {"id": "b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64}, "parameters": 7e9}


def test_a_budget_is_answered_as_the_library_answers_it(server: str) -> None:
    answer = httpx.post(f"{server}/v1/sizings", json=BUDGET, timeout=60)
    assert answer.status_code == 200
    assert answer.json() == schema.to_dict(answer_sizing(parse_sizing(BUDGET)))
    with Client(server=server) as client:
        assert client.size(query=BUDGET) == answer.json()
    onward = httpx.post(
        f"{server}/v1/recommendations?top=1", json=answer.json()["sizing"]["query"], timeout=60
    ).json()
    assert onward["recommendations"][0]["estimate"]["days"] == pytest.approx(
        answer.json()["sizing"]["days"]
    )


def test_bad_bodies_are_problems(server: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for body, status, code in (
        ({"days": 3.0}, 422, "missing_field"),
        ({"parameterz": 7e9}, 422, "unknown_key"),
        ({"model": str(tmp_path / "config.json"), "tokens": 1e9}, 422, "invalid_input"),
    ):
        answer = httpx.post(f"{server}/v1/sizings", json=body, timeout=60)
        assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_the_api_description_knows_the_body(server: str) -> None:
    paths = httpx.get(f"{server}/openapi.json", timeout=60).json()
    body = paths["paths"]["/v1/sizings"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert body["$ref"].endswith("SizingQuery-Input")
    assert (
        "tokens_per_parameter" in paths["components"]["schemas"]["SizingQuery-Input"]["properties"]
    )
