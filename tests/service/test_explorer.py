"""The explorer without a browser: its address is its state, and what it says is what the API
says.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fastapi.testclient import TestClient

from hp_tool.questions import schema
from hp_tool.questions.training.evaluate import resolve_configuration
from service.dashboard.new_search_form import to_query
from tests.service.detailed import DETAILED

LLAMA = {
    "model": "llama-3-70b",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": 64,
    "training.sequence_length": 8192,
    "training.global_batch_size": 512,
}


LORA = {"training.task": "lora", "training.lora.rank": 16}
GPT = {
    "model": "gpt3-175b",
    "cluster.gpu": "a100-sxm-80gb",
    "cluster.num_gpus": 64,
    "training.global_batch_size": 64,
}


def at(**layout: object) -> dict[str, object]:
    """The address's values of a shown layout, whose sizes have short names here."""
    long = {
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "recompute": "recompute",
    }
    return {f"at.parallel.{long[name]}": value for name, value in layout.items()}


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
    first = page["rows"][0]
    assert first["chosen"] and first["parallel"] == best["parallel"]
    assert page["at"]["parallel.tensor_parallel_size"] == str(
        best["parallel"]["tensor_parallel_size"]
    )
    assert first["step_s"] == pytest.approx(best["estimate"]["time"]["step_s"])
    layouts = [
        (row["parallel"]["tensor_parallel_size"], row["parallel"]["pipeline_parallel_size"])
        for row in page["rows"]
    ]
    assert len(set(layouts)) == len(layouts)


def test_every_link_leads_where_it_says(shared_http: TestClient) -> None:
    page = twin(shared_http, **LLAMA)
    second = page["rows"][1]
    there = shared_http.get(second["settings_href"].replace("/explorer?", "/explorer.json?")).json()
    assert there["view"]["heading"] == second["arithmetic"]
    slower = second["step_s"] / page["rows"][0]["step_s"] - 1.0
    assert there["slower_fraction"] == (pytest.approx(slower) if slower >= 0.005 else None)
    slow = twin(shared_http, **LLAMA, **at(tp=8, pp=2))
    assert slow["slower_fraction"] > 0.005 and page["slower_fraction"] is None
    assert (
        "slower than the best, <a " in shared_http.get(slow["json_href"].replace(".json", "")).text
    )
    assert shared_http.get(page["configuration_href"]).status_code == 200
    again = shared_http.get(page["json_href"]).json()
    assert (again["values"], again["at"], again["view"]["metrics"]) == (
        page["values"],
        page["at"],
        page["view"]["metrics"],
    )


def test_what_does_not_fit_says_why_and_what_mends_it(shared_http: TestClient) -> None:
    page = twin(shared_http, **LLAMA, **at(tp=1, pp=1))
    assert page["view"]["verdict"] == "does not fit"
    assert page["view"]["reasons"][0]["code"] == "memory" and page["view"]["fixes"]


def test_the_switches_of_the_paper(shared_http: TestClient) -> None:
    page = twin(
        shared_http,
        **GPT,
        **{"training.sequence_length": 2048, "training.attention": "unfused"},
        **at(tp=8, pp=8),
    )
    sizes = {bar["label"]: bar["total"] for bar in page["effect_memory"]["bars"]}
    times = {bar["label"]: bar["total"] for bar in page["effect_time"]["bars"]}
    assert list(sizes) == [
        "Neither",
        "Sequence parallel",
        "core_attn recomputed",
        "Both",
        "Full recomputation",
    ]
    assert (
        sizes["Neither"]
        > max(sizes["Sequence parallel"], sizes["core_attn recomputed"])
        > sizes["Both"]
    )
    assert (
        times["Full recomputation"]
        > max(times["core_attn recomputed"], times["Both"])
        > times["Neither"]
    )
    alone = twin(
        shared_http,
        **GPT,
        **at(tp=1, pp=8),
    )
    assert [bar["label"] for bar in alone["effect_time"]["bars"]] == [
        "Neither",
        "core_attn recomputed",
        "Full recomputation",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "no-such"},
        {"cluster.num_gpus": 13},
        {"training.precision": "fp4"},
        {"model": "/etc/passwd"},
        {"cluster.num_gpus": "many"},
        {"at.parallel.tensor_parallel_size": 0},
        {"at.parallel.sequence_parallel": "maybe"},
    ],
)
def test_what_cannot_be_answered_stands_on_the_page(
    shared_http: TestClient, change: dict[str, Any]
) -> None:
    page = twin(shared_http, **LLAMA | change)
    assert page["error"]["message"] and page["view"] is None
    assert "This cannot be answered" in shared_http.get("/explorer", params=LLAMA | change).text


def test_a_registered_model_can_be_chosen(shared_http: TestClient) -> None:
    spec = {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 1024,
    }
    assert shared_http.post("/v1/models", json={"name": "mine", "spec": spec}).status_code == 201
    page = twin(shared_http, **LLAMA | {"model": "mine"})
    assert "mine" in page["models"] and page["view"]["feasible"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_gpus": 8}, "did you mean cluster.num_gpus?"),
        ({"kind": "dreaming"}, "`kind` must be "),
    ],
)
def test_an_address_has_only_fields_of_a_query(
    shared_http: TestClient, wrong: dict[str, Any], told: str
) -> None:
    response = shared_http.get("/explorer.json", params=LLAMA | wrong)
    assert response.status_code == 422 and told in response.json()["detail"]


def test_adapters_on_a_quantised_base(shared_http: TestClient) -> None:
    pages = [
        twin(shared_http, **LLAMA | LORA | {"training.frozen_precision": name} | at(tp=8))
        for name in ("bf16", "nf4")
    ]
    wide, narrow = (page["view"]["memory"]["bars"][0]["total"] for page in pages)
    assert narrow < 0.9 * wide
    assert 'value="16"' in shared_http.get("/explorer", params=LLAMA | LORA).text


@pytest.mark.parametrize("query", DETAILED.values(), ids=DETAILED)
def test_a_configuration_opened_in_the_explorer_is_the_same_question(
    shared_http: TestClient, query: dict[str, Any]
) -> None:
    first = shared_http.get("/configurations.json", params={"query": json.dumps(query)}).json()
    assert first["error"] is None
    page = shared_http.get(first["explorer_href"].replace("/explorer?", "/explorer.json?")).json()
    assert page["error"] is None and page["view"]["metrics"] == first["view"]["metrics"]
    again = schema.parse_query(parse_qs(urlsplit(page["configuration_href"]).query)["query"][0])
    before = schema.parse_query(query)
    assert (again.model, again.cluster, again.training) == (
        before.model,
        before.cluster,
        before.training,
    )
    assert again.constraints == before.constraints
    assert resolve_configuration(again).config == resolve_configuration(before).config
    written = {
        name for name in before.parallel.__slots__ if getattr(before.parallel, name) is not None
    }
    assert {name: getattr(again.parallel, name) for name in written} == {
        name: getattr(before.parallel, name) for name in written
    }
    form = shared_http.get(
        first["form_href"].replace("/searches/new?", "/searches/new.json?")
    ).json()["values"]
    assert schema.parse_query(to_query(form)) == before


def test_what_a_field_says_changes_the_prediction(shared_http: TestClient) -> None:
    usual = twin(shared_http, **LLAMA, **at(tp=8))
    for field, value, part in (
        ("training.gradient_precision", "bf16", "memory"),
        ("training.cross_entropy", "chunked", "memory"),
    ):
        page = twin(shared_http, **LLAMA, **at(tp=8), **{field: value})
        assert page["values"][field] == value
        assert page["view"][part]["bars"][0]["total"] < usual["view"][part]["bars"][0]["total"]
    boxes = ["selective", "layernorm", "mlp"]  # a choice, and boxes of the same name
    modules = twin(shared_http, **LLAMA, **at(tp=8, recompute=boxes))
    assert "selective layernorm+mlp recomputation" in modules["view"]["details"]
    assert modules["recomputed"] == ["layernorm", "mlp"]


def test_the_address_may_name_any_path_of_a_query(shared_http: TestClient) -> None:
    page = twin(shared_http, **LLAMA, **{"training.optimizer": "muon"})
    assert page["values"]["extra"] == "training:\n  optimizer: muon"
    assert page["error"] is None
    wrong = twin(shared_http, **LLAMA, **{"training.cross_entropi": "fused"})
    assert "did you mean cross_entropy" in wrong["error"]["message"]
    assert twin(shared_http, **LLAMA, extra="a: [1")["error"]["field"] == "extra"


def test_a_recipe_is_chosen_and_what_is_assumed_is_said(shared_http: TestClient) -> None:
    usual, recipe = (
        twin(shared_http, **LLAMA, **at(tp=8), **{"training.recipe": name})
        for name in ("", "megatron-bridge-26.06")
    )
    assert recipe["values"]["training.recipe"] == "megatron-bridge-26.06"
    sources = [
        {fact["name"]: fact["value"] for fact in page["view"]["provenance"]}
        for page in (usual, recipe)
    ]
    assert "gradient precision fp32, " in sources[0]["assumed"]
    assert "gradient precision bf16, " in sources[1]["assumed"]
    fsdp = twin(shared_http, **LLAMA, **{"training.recipe": "trl"})
    assert fsdp["at"]["parallel.zero_stage"] in ("2", "3") and fsdp["modules"] == []


def test_another_framework_has_its_own_choices(shared_http: TestClient) -> None:
    page = twin(shared_http, **LLAMA, **{"training.framework": "torch-fsdp"})
    options = {
        control["name"].rpartition(".")[2]: [option["value"] for option in control["options"]]
        for control in page["controls"]
    }
    assert options["zero_stage"] == ["2", "3"]
    assert options["recompute"] == ["none", "per_op", "per_layer"]
    assert page["modules"] == [] and page["effect_time"]["bars"]
    mixture = twin(shared_http, **LLAMA | {"model": "deepseek-v3", "cluster.num_gpus": 1024})
    known = {"core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"}
    assert set(mixture["modules"]) == known and len(mixture["modules"]) == len(known)
    assert "at.parallel.expert_tensor_parallel_size" in {
        control["name"] for control in mixture["controls"]
    }


def test_serving_has_an_explorer_whose_address_is_a_query(shared_http: TestClient) -> None:
    page = shared_http.get("/explorer.json?kind=inference").json()
    assert (
        page["error"] is None
        and page["view"]["verdict"] == "fits"
        and page["view"]["kind"] == "inference"
    )
    best = page["rows"][0]
    assert best["chosen"] and best["rank"] == 1 and page["view"]["heading"] == best["arithmetic"]
    fixed = "4" if best["parallel"]["tensor_parallel_size"] == 8 else "8"  # not the best
    other = shared_http.get(
        f"/explorer.json?kind=inference&at.parallel.tensor_parallel_size={fixed}"
    ).json()
    (shown,) = (
        control["value"]
        for control in other["controls"]
        if control["name"] == "at.parallel.tensor_parallel_size"
    )
    assert (
        shown == fixed
        and other["view"]["heading"].startswith(f"TP {fixed}")
        and other["rows"][0]["rank"] == 1
    )
    assert (
        shared_http.get(best["settings_href"].replace("?", ".json?")).json()["view"]["heading"]
        == page["view"]["heading"]
    )
    form = shared_http.get(page["form_href"].replace("?", ".json?")).json()
    assert form["kind"] == "inference" and form["values"]["inference.concurrency"] == "64"
    slow = shared_http.get("/explorer.json?kind=inference&targets.tpot_s=0.0001").json()
    assert (
        slow["nothing_fits"]
        and slow["rows"][0]["reasons"]
        and slow["view"]["verdict"] == "misses a target"
    )
    for wrong in (
        "at.parallel.tensor_parallel_size=x",
        "inference.input_length=0",
        "model=none",
        "cluster.num_gpus=0",
    ):
        answer = shared_http.get(f"/explorer?kind=inference&{wrong}")
        assert answer.status_code == 200 and "This cannot be answered" in answer.text, wrong
    alone = shared_http.get("/explorer.json?kind=inference&model=qwen3-32b").json()
    assert alone["error"] is None and alone["values"]["cluster.num_gpus"] == "8", (
        "what a link leaves open is filled"
    )
    highest = shared_http.get(
        "/explorer.json?kind=inference&model=qwen3-32b&targets.tpot_s=0.05&inference.input_length=500"
    ).json()
    assert highest["error"] is None and "inference.concurrency" not in highest["values"]


def test_a_tab_keeps_the_question(shared_http: TestClient) -> None:
    asked = {"model": "qwen3-32b", "training.sequence_length": "2048", "cluster.num_gpus": "16"}
    page = twin(shared_http, **asked, **{"training.gradient_precision": "bf16"})
    for tab in ("Serving", "Several machines", "Training"):
        (href,) = (each["href"] for each in page["tabs"] if each["label"] == tab)
        page = shared_http.get(href.replace("?", ".json?")).json()
        assert page["error"] is None and [
            each["label"] for each in page["tabs"] if each["here"]
        ] == [tab]
        assert page["values"].items() >= asked.items()
        assert page["values"]["training.gradient_precision"] == "bf16"
    assert page["kind"] == "training" and not page["several"]
