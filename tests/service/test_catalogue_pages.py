"""Models, GPUs, clusters, keys and audit as pages: browsed, added to, and kept from others."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.access import Scope
from hp_tool.store import SqlStore
from service.app import create_app
from service.settings import Settings
from tests.service.test_access import OPERATOR, key

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
EVIL = "</script><script>alert(1)</script>"


@pytest.fixture
def guarded(store: SqlStore) -> Iterator[TestClient]:
    app = create_app(Settings(api_key=OPERATOR, poll_s=0.02), store=store)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("models", "gemma-4-31b"),
        ("gpus", "h100-sxm-80gb"),
        ("clusters", "dgx-h100"),
    ],
)
def test_browsing(http: TestClient, section: str, name: str) -> None:
    page, twin = http.get(f"/{section}"), http.get(f"/{section}.json").json()
    row = next(row for row in twin["rows"] if row["name"] == name)
    assert page.status_code == 200 and row["href"] in page.text
    entry = http.get(f"{row['href']}.json").json()
    assert entry["facts"] and http.get(row["href"]).status_code == 200
    if entry["explorer_href"]:
        assert http.get(entry["explorer_href"]).status_code == 200
    assert entry["gpu_href"] == ("/gpus/h100-sxm-80gb" if section == "clusters" else None)
    assert http.get(f"/{section}/no-such").status_code == 404


def test_gpus_are_found_by_a_part_of_a_name_and_a_cluster_says_what_its_gpu_brings(
    http: TestClient,
) -> None:
    rows = http.get("/gpus.json", params={"words": "V100-"}).json()["rows"]
    assert {row["name"] for row in rows} == {"v100-sxm-32gb", "v100-sxm3-32gb-h"}
    assert rows[0]["half_flops_per_second"] == 125e12
    assert ">125<" in http.get("/gpus?words=v100").text
    facts = {
        fact["name"]: fact["value"] for fact in http.get("/clusters/dgx-h100.json").json()["facts"]
    }
    assert facts["network per GPU"] == "50 GB/s" and facts["scale-up link per GPU"] == "450 GB/s"
    assert (
        facts["memory per node"] == "632.80 GiB"
        and facts["$ per GPU-hour"] == "no list price; $6.88 is typical for this GPU"
    )
    alone = {
        fact["name"]: fact["value"]
        for fact in http.get("/clusters/aws-g6e.48xlarge.json").json()["facts"]
    }
    assert "PCIe per GPU" in alone and "no list price" not in alone.get("$ per GPU-hour", "")


def test_the_list_of_gpus_states_the_lowest_price_that_the_list_of_machines_has(
    http: TestClient,
) -> None:
    (gpu,) = (
        row for row in http.get("/gpus.json").json()["rows"] if row["name"] == "h100-sxm-80gb"
    )
    asked = {"cluster.node_type": "priced", "cluster.gpu": "h100-sxm-80gb", "cluster.num_gpus": "8"}
    machines = http.get("/explorer.json", params=asked).json()["machines"]["rows"]
    prices = {row["machine"]: row["price"]["per_gpu_hour"] for row in machines}
    assert gpu["lowest_price_per_hour"] == min(prices.values()) < gpu["price_per_hour"]
    page = http.get("/gpus?words=h100-sxm-80gb").text
    assert (
        f"from ${gpu['lowest_price_per_hour']:.2f}" in page
        and f"${gpu['price_per_hour']:.2f}" in page
    )


def test_the_parameters_of_a_known_model(http: TestClient) -> None:
    rows = {
        row["name"]: row
        for name in ("llama-3", "deepseek")
        for row in http.get(f"/models.json?words={name}").json()["rows"]
    }
    assert rows["llama-3-70b"]["parameters"] == pytest.approx(70.6e9, rel=0.01)
    assert rows["deepseek-v3"]["active_parameters"] < rows["deepseek-v3"]["parameters"] / 10


def test_a_config_json_becomes_a_model_and_goes_again(http: TestClient) -> None:
    added = http.post(
        "/models", data={"name": "mine", "spec": json.dumps(CONFIG)}, follow_redirects=False
    )
    assert (added.status_code, added.headers["location"]) == (303, "/models?done=added")
    row = next(row for row in http.get("/models.json").json()["rows"] if row["name"] == "mine")
    assert row["registered"] and row["num_key_value_heads"] == 2
    assert http.get("/models/mine.json").json()["remove_href"] == "/models/mine/remove"
    assert http.get("/models/llama-3-70b.json").json()["remove_href"] is None
    assert http.post("/models/mine/remove").status_code == 200
    assert http.get("/models/mine").status_code == 404


def test_a_long_list_is_paged_and_searched(http: TestClient) -> None:
    names = [model["name"] for model in http.get("/v1/models").json()["items"]]
    href, seen = "/models", []
    while href:
        assert http.get(href).status_code == 200
        page = http.get(href.replace("/models", "/models.json", 1)).json()
        assert len(page["rows"]) <= 50
        seen += [row["name"] for row in page["rows"]]
        href = page["next_href"]
    assert seen == names and len(names) > 100
    found = http.get("/models.json", params={"words": " Qwen2 "}).json()
    assert (
        [row["name"] for row in found["rows"]] == [name for name in names if "qwen2" in name] != []
    )
    assert "No name contains" in http.get("/clusters", params={"words": "<b>"}).text
    http.post("/models", data={"name": "zz-mine", "spec": json.dumps(CONFIG)})
    assert (
        http.get("/models.json").json()["rows"][0]["name"] == "zz-mine"
    )  # what was added is not on the last page


def test_a_cluster_in_yaml(http: TestClient) -> None:
    example = html.unescape(re.findall(r'placeholder="([^"]*)"', http.get("/clusters").text)[-1])
    assert (
        http.post(
            "/clusters", data={"name": "lab", "spec": example}, follow_redirects=False
        ).status_code
        == 303
    )
    assert http.get("/clusters/lab").status_code == 200


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "llama-3-70b", "spec": json.dumps(CONFIG)}, "choose another name"),
        ({"name": "mine", "spec": "hidden_size: 12"}, "num_hidden_layers"),
        ({"name": "mine", "spec": EVIL}, "mapping"),
        ({"name": EVIL, "spec": json.dumps(CONFIG)}, "is not a valid name"),
    ],
)
def test_what_is_wrong_stands_at_the_form_with_what_was_typed(
    http: TestClient, fields: dict[str, str], said: str
) -> None:
    answer = http.post("/models", data=fields)
    assert answer.status_code == 422
    text = html.unescape(answer.text)
    assert said in text and fields["spec"] in text
    assert EVIL not in answer.text


def test_keys_are_made_shown_once_and_revoked(guarded: TestClient) -> None:
    operator = {"Authorization": f"Bearer {OPERATOR}"}
    assert guarded.get("/keys").status_code == 401
    made = guarded.post(
        "/keys", data={"owner": "ada", "scope": "submit", "lifetime_days": "30"}, headers=operator
    )
    token = re.findall(r"hp_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", made.text)[0]
    assert "no-store" in made.headers["cache-control"]
    ada = {"Authorization": f"Bearer {token}"}
    assert guarded.get("/models", headers=ada).status_code == 200
    assert token not in guarded.get("/keys", headers=operator).text
    (row,) = guarded.get("/keys.json", headers=operator).json()["rows"]
    assert (row["owner"], row["scope"], row["state"]) == ("ada", "submit", "valid")
    assert guarded.post(row["revoke_href"], headers=operator).status_code == 200
    assert guarded.get("/models", headers=ada).status_code in (401, 403)
    rows = guarded.get("/audit.json", headers=operator).json()["rows"]
    assert {"POST /keys", "POST /keys/{key_id}/revoke"} <= {record["action"] for record in rows}
    deeds = [(each["deed"], each["object"], each["result"]) for each in rows]
    assert deeds[1:] == [("revoke key", row["id"], "done"), ("create key", row["id"], "done")]
    assert deeds[0][2] == "unauthorized"
    guarded.post("/v1/models", json={"name": "mine", "spec": CONFIG}, headers=operator)
    guarded.delete("/v1/models/none", headers=operator)
    failed, made = guarded.get("/audit.json", headers=operator).json()["rows"][:2]
    assert (made["deed"], made["object"], made["href"]) == ("create model", "mine", "/models/mine")
    assert (failed["deed"], failed["result"], failed["href"]) == ("delete model", "not found", None)
    assert guarded.get("/audit", headers=operator, params={"owner": "ada"}).status_code == 200


def test_a_key_with_a_bad_field_is_not_made(guarded: TestClient) -> None:
    operator = {"Authorization": f"Bearer {OPERATOR}"}
    for fields in (
        {"owner": "ada", "scope": "god"},
        {"owner": "ada", "scope": "read", "lifetime_days": "soon"},
        {"scope": "read"},
    ):
        assert guarded.post("/keys", data=fields, headers=operator).status_code == 422
    assert guarded.get("/keys.json", headers=operator).json()["rows"] == []


@pytest.mark.parametrize("scope", [Scope.READ, Scope.SUBMIT])
def test_only_administrators_see_keys_and_audit(
    guarded: TestClient, store: SqlStore, scope: Scope
) -> None:
    headers = key(store, scope)
    for path in ("/keys", "/keys.json", "/audit", "/audit.json"):
        assert guarded.get(path, headers=headers).status_code == 403
    assert (
        guarded.post("/keys", data={"owner": "me", "scope": "admin"}, headers=headers).status_code
        == 403
    )
    assert ('name="spec"' in guarded.get("/models", headers=headers).text) == (
        scope >= Scope.SUBMIT
    )


def test_a_gpu_says_what_its_figures_are_of(http: TestClient) -> None:
    facts = {
        fact["name"]: fact["value"] for fact in http.get("/gpus/h100-sxm-80gb.json").json()["facts"]
    }
    assert (
        "fp32 (as TF32) 494.7 TFLOP/s" in facts["peak"]
        and facts["memory"] == "79.10 GiB (75.14 GiB usable, 5.0% reserved)"
    )
    assert facts["host power per GPU"] == "575 W" and facts["profile runs"] == "yes"
    assert re.fullmatch(
        r"\$6\.88 on demand, typical \(aws-\S+, \d{4}-\d\d-\d\d\); lowest \$[\d.]+ \(\S+, \S+\)",
        facts["$ per GPU-hour"],
    )
    old = {
        fact["name"]: fact["value"] for fact in http.get("/gpus/v100-sxm-32gb.json").json()["facts"]
    }
    assert "fp32 15.7 TFLOP/s" in old["peak"]
