"""The explorer without a browser: its address is its state, and what it says is what the API says."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

LLAMA = {"model": "llama-3-70b", "gpu": "h100-sxm-80gb", "num_gpus": 64, "sequence_length": 8192, "global_batch_size": 512}


def twin(http: TestClient, **asked: Any) -> dict[str, Any]:
    response = http.get("/explorer.json", params=asked)
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def test_it_opens_at_the_fastest_configuration(shared_http: TestClient) -> None:
    page = twin(shared_http, **LLAMA)
    query = {
        "kind": "training",
        "model": "llama-3-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 8192, "global_batch_size": 512},
    }
    best = shared_http.post("/v1/recommendations", json=query).json()["recommendations"][0]
    first = page["fastest"][0]
    assert first["chosen"] and first["parallel"] == best["parallel"]
    assert page["settings"]["tp"] == best["parallel"]["tensor_parallel_size"]
    assert first["step_s"] == pytest.approx(best["estimate"]["time"]["step_s"])
    layouts = [(row["parallel"]["tensor_parallel_size"], row["parallel"]["pipeline_parallel_size"]) for row in page["fastest"]]
    assert len(set(layouts)) == len(layouts)


def test_every_link_leads_where_it_says(shared_http: TestClient) -> None:
    page = twin(shared_http, **LLAMA)
    second = page["fastest"][1]
    there = shared_http.get(second["href"].replace("/explorer?", "/explorer.json?")).json()
    assert there["view"]["heading"] == second["arithmetic"]
    assert shared_http.get(page["configuration_href"]).status_code == 200
    again = shared_http.get(page["json_href"]).json()
    assert (again["settings"], again["view"]["metrics"]) == (page["settings"], page["view"]["metrics"])


def test_what_does_not_fit_says_why_and_what_mends_it(shared_http: TestClient) -> None:
    page = twin(shared_http, **LLAMA, tp=1, pp=1)
    assert page["view"]["verdict"] == "does not fit"
    assert page["view"]["reasons"][0]["code"] == "memory" and page["view"]["mends"]


def test_the_switches_of_the_paper(shared_http: TestClient) -> None:
    page = twin(shared_http, model="gpt3-175b", gpu="a100-sxm-80gb", num_gpus=64, sequence_length=2048, global_batch_size=64,
                attention="unfused", tp=8, pp=8)  # fmt: skip
    sizes = {bar["label"]: bar["total"] for bar in page["effect_memory"]["bars"]}
    times = {bar["label"]: bar["total"] for bar in page["effect_time"]["bars"]}
    assert list(sizes) == ["Neither", "Sequence parallel", "Selective recomputation", "Both", "Full recomputation"]
    assert sizes["Neither"] > max(sizes["Sequence parallel"], sizes["Selective recomputation"]) > sizes["Both"]
    assert times["Full recomputation"] > max(times["Selective recomputation"], times["Both"]) > times["Neither"]
    alone = twin(shared_http, model="gpt3-175b", gpu="a100-sxm-80gb", num_gpus=64, global_batch_size=64, tp=1, pp=8)
    assert [bar["label"] for bar in alone["effect_time"]["bars"]] == [
        "Neither",
        "Selective recomputation",
        "Full recomputation",
    ]


@pytest.mark.parametrize("change", [{"model": "no-such"}, {"num_gpus": 13}, {"precision": "fp4"}, {"model": "/etc/passwd"}])
def test_what_cannot_be_answered_stands_on_the_page(shared_http: TestClient, change: dict[str, Any]) -> None:
    page = twin(shared_http, **LLAMA | change)
    assert page["error"]["message"] and page["view"] is None
    assert "This cannot be answered" in shared_http.get("/explorer", params=LLAMA | change).text


def test_a_registered_model_can_be_chosen(shared_http: TestClient) -> None:
    spec = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1024}
    assert shared_http.post("/v1/models", json={"name": "mine", "spec": spec}).status_code == 201
    page = twin(shared_http, **LLAMA | {"model": "mine"})
    assert "mine" in page["models"] and page["view"]["feasible"]


@pytest.mark.parametrize("wrong", [{"tp": 0}, {"num_gpus": "many"}, {"sp": "maybe"}, {"model": "x" * 101}])
def test_an_address_is_bounded(shared_http: TestClient, wrong: dict[str, Any]) -> None:
    assert shared_http.get("/explorer", params=LLAMA | wrong).status_code == 422


def test_adapters_on_a_quantised_base(shared_http: TestClient) -> None:
    pages = [twin(shared_http, **LLAMA | {"lora_rank": 16, "frozen_precision": name, "tp": 8}) for name in ("bf16", "nf4")]
    wide, narrow = (page["view"]["memory"]["bars"][0]["total"] for page in pages)
    assert narrow < 0.9 * wide
    assert 'value="16"' in shared_http.get("/explorer", params=LLAMA | {"lora_rank": 16}).text
