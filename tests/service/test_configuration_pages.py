"""Pages of one and of two configurations: what they say, their twins, and what they refuse."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx import Response

LLAMA: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
    "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4},
}
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 64,
        "precision": "fp8",
    },
    "parallel": {"tensor_parallel_size": 4},
}
ALONE = LLAMA | {"parallel": {"tensor_parallel_size": 1}}
EVIL = "<script>alert('x')</script>"


def shown(http: TestClient, query: dict[str, Any], *, twin: bool = False) -> Response:
    return http.get(
        f"/configurations{'.json' if twin else ''}", params={"query": json.dumps(query)}
    )


def test_a_configuration_and_its_twin(shared_http: TestClient) -> None:
    page, twin = shown(shared_http, LLAMA), shown(shared_http, LLAMA, twin=True).json()
    assert page.status_code == 200
    assert "TP 8 x PP 4 x DP 2 = 64 GPUs" in page.text
    view = twin["view"]
    estimate = shared_http.post("/v1/estimates", json=LLAMA).json()["estimate"]
    assert [bar["label"] for bar in view["memory"]["bars"]] == [
        "Stage 0",
        "Stage 1",
        "Stage 2",
        "Stage 3",
    ]
    assert view["memory"]["bars"][0]["total"] == pytest.approx(estimate["memory"]["total_bytes"])
    assert view["memory"]["limit"] == pytest.approx(estimate["memory"]["capacity_bytes"])
    assert view["time"]["bars"][0]["total"] == pytest.approx(estimate["time"]["step_s"])
    assert (
        twin["schedule"]["name"],
        len(twin["schedule"]["rows"]),
        twin["placement"]["num_nodes"],
    ) == ("1f1b", 4, 8)
    metrics = {metric["name"]: metric for metric in view["metrics"]}
    assert (
        metrics["Step time"]["low"] < metrics["Step time"]["value"] < metrics["Step time"]["high"]
    )
    # The address in the page leads back to it.
    again = shared_http.get(twin["json_href"]).json()
    assert again["view"]["metrics"] == view["metrics"]


def test_what_fits_is_judged_from_the_interval_which_is_drawn(shared_http: TestClient) -> None:
    view = shown(shared_http, LLAMA, twin=True).json()["view"]
    fullest = view["memory"]["bars"][0]
    low, high = fullest["interval"]
    assert low < fullest["total"] < high and view["memory"]["bars"][1]["interval"] is None
    assert shown(shared_http, LLAMA).text.count('class="interval"') == 2  # of memory and of time
    whole, total = view["memory"]["limit"] / 0.95, fullest["total"]
    for verdict, headroom in (
        ("fits", 0.05),
        ("fits", 1.0 - 1.01 * total / whole),
        ("too little headroom", 0.5),
    ):
        query = LLAMA | {"constraints": {"memory_headroom_fraction": headroom}}
        page = shown(shared_http, query, twin=True).json()["view"]
        assert (page["verdict"], page["feasible"]) == (verdict, verdict == "fits"), headroom
        assert bool(page["verdict_note"]) == (verdict != "fits")


@pytest.mark.parametrize("stages", [16, 40])
def test_sixteen_stages_are_drawn_of_sixteen_and_of_more(
    shared_http: TestClient, stages: int
) -> None:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": stages}
    query = LLAMA | {
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": stages, "gpus_per_node": 8},
        "parallel": parallel,
    }
    view = shown(shared_http, query, twin=True).json()["view"]
    bars = view["memory"]["bars"]
    assert (len(bars), view["num_stages"]) == (16, stages)
    assert sum(bar["interval"] is not None for bar in bars) == 1  # the fullest is among them


def test_why_not_and_what_mends_it(shared_http: TestClient) -> None:
    twin = shown(shared_http, ALONE, twin=True).json()
    view = twin["view"]
    assert (view["verdict"], view["feasible"]) == ("does not fit", False)
    assert view["memory"]["bars"][0]["over"]
    mended = shared_http.get(
        view["fixes"][0]["href"].replace("/configurations?", "/configurations.json?")
    ).json()
    assert mended["view"]["feasible"]
    beside = shared_http.get(
        view["fixes"][0]["compare_href"].replace("/compare?", "/compare.json?")
    ).json()
    assert [each["feasible"] for each in beside["views"]] == [False, True]
    assert "TP" in {row["name"] for row in beside["differences"]}


def test_a_way_to_serve_that_misses_its_target_is_mended_too(shared_http: TestClient) -> None:
    hurried = SERVING | {"targets": {"tpot_s": 0.008}}
    page, view = (
        shown(shared_http, hurried).text,
        shown(shared_http, hurried, twin=True).json()["view"],
    )
    assert view["verdict"] == "misses a target" and "How to fix it" in page
    for fix in view["fixes"]:
        figures = {figure["name"]: figure["value"] for figure in fix["figures"]}
        mended = shared_http.get(
            fix["href"].replace("/configurations?", "/configurations.json?")
        ).json()["view"]
        metrics = {metric["name"]: metric["value"] for metric in mended["metrics"]}
        assert metrics["Time per output token"] == pytest.approx(figures["TPOT"])
        assert mended["feasible"] == (not fix["remaining"])
    beside = shared_http.get(
        view["fixes"][0]["compare_href"].replace("/compare?", "/compare.json?")
    ).json()
    assert [each["feasible"] for each in beside["views"]] == [False, True]


def test_a_mend_on_more_devices_leads_to_them(shared_http: TestClient) -> None:
    """Also where the cluster is one node by its name."""
    crowded = LLAMA | {"cluster": "dgx-h100", "parallel": {"tensor_parallel_size": 8}}
    view = shown(shared_http, crowded, twin=True).json()["view"]
    grown = next(fix for fix in view["fixes"] if "GPUs" in fix["change"])
    assert shared_http.get(
        grown["href"].replace("/configurations?", "/configurations.json?")
    ).json()["view"]["feasible"]


def test_an_illegal_one_has_reasons_and_no_figures(shared_http: TestClient) -> None:
    page = shown(shared_http, LLAMA | {"parallel": {"tensor_parallel_size": 3}})
    assert page.status_code == 200
    assert "not possible" in page.text and "does not divide" in page.text


def test_serving_has_its_own_figures(shared_http: TestClient) -> None:
    twin = shown(shared_http, SERVING, twin=True).json()
    assert "Time to first token" in {metric["name"] for metric in twin["view"]["metrics"]}
    assert twin["schedule"] is None and "KV cache" in shown(shared_http, SERVING).text


def test_two_side_by_side(shared_http: TestClient) -> None:
    asked = {
        "first": json.dumps(LLAMA),
        "second": json.dumps(
            LLAMA | {"parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8}}
        ),
    }
    page, twin = (
        shared_http.get("/compare", params=asked),
        shared_http.get("/compare.json", params=asked).json(),
    )
    assert page.status_code == 200
    assert {row["name"]: row["values"] for row in twin["differences"]} == {
        "PP": ["4", "8"],
        "DP": ["2", "1"],
    }
    row = next(row for row in twin["rows"] if row["name"] == "Step time")
    assert row["changes"] == [None, pytest.approx(row["values"][1] / row["values"][0] - 1)]
    assert row["best"] == int(row["changes"][1] < 0)
    more = [json.dumps(LLAMA | {"parallel": {"tensor_parallel_size": size}}) for size in (4, 2)]
    many = shared_http.get("/compare.json", params=asked | {"more": more}).json()
    sizes = ((8, 4, 2), (8, 8, 1), (4, 1, 16), (2, 1, 32))
    names = [f"TP {tp} x PP {pp} x DP {dp}" for tp, pp, dp in sizes]
    assert (many["names"], len(many["views"])) == (names, 4)
    assert [bar["label"] for bar in many["memory"]["bars"]] == many["names"]
    fewer = shared_http.get(many["without"][1].replace("/compare?", "/compare.json?")).json()
    assert fewer["names"] == names[:1] + names[2:]
    assert next(row["values"] for row in many["differences"] if row["name"] == "TP") == [
        "8",
        "8",
        "4",
        "2",
    ]
    sizes_of_six = [{"tensor_parallel_size": 4, "micro_batch_size": size} for size in (2, 4)]
    more += [json.dumps(LLAMA | {"parallel": parallel}) for parallel in sizes_of_six]
    six = shared_http.get("/compare", params=asked | {"more": more})
    assert six.status_code == 422 and "At most 5" in six.text
    mixed = shared_http.get(
        "/compare", params={"first": json.dumps(LLAMA), "second": json.dumps(SERVING)}
    )
    assert mixed.status_code == 422 and "cannot be compared" in mixed.text


def test_one_is_compared_with_the_one_to_try(shared_http: TestClient) -> None:
    slower = SERVING | {"parallel": {"tensor_parallel_size": 8}}
    for query, figure in ((LLAMA, "Step time"), (slower, "Output tokens/s per GPU")):
        views = shared_http.get("/compare.json", params={"first": json.dumps(query)}).json()[
            "views"
        ]
        one, best = (
            {metric["name"]: metric["value"] for metric in view["metrics"]}[figure]
            for view in views
        )
        assert best < one if query is LLAMA else best > one


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "llama-3-71b"}, "nknown model"),
        ({"model": "/etc/passwd"}, "nknown model"),
        ({"trainer": {"command": ["true"], "reader": "megatron-lm"}}, "do not run commands"),
        ({"sarch": {}}, "did you mean search"),
    ],
)
def test_what_cannot_be_answered_is_a_page_that_says_why(
    shared_http: TestClient, change: dict[str, Any], said: str
) -> None:
    page = shown(shared_http, LLAMA | change)
    assert page.status_code == 422
    assert said in html.unescape(page.text)
    assert shared_http.get(
        "/configurations.json", params={"query": json.dumps(LLAMA | change)}
    ).json()["error"]["message"]


def test_a_users_words_are_text(shared_http: TestClient) -> None:
    own = {
        "name": EVIL,
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 1024,
    }
    page = shown(shared_http, LLAMA | {"model": own, "parallel": {"tensor_parallel_size": 8}})
    assert page.status_code == 200
    assert EVIL not in page.text and html.escape(EVIL, quote=False).split("&#")[0][:10] in page.text
    assert not re.search(r"<script(?![^>]* src=)", page.text)
    assert not re.search(r"\s(style|on\w+)=", page.text)


def test_what_cannot_run_is_better_at_nothing(shared_http: TestClient) -> None:
    twin = shared_http.get(
        "/compare.json", params={"first": json.dumps(ALONE), "second": json.dumps(LLAMA)}
    ).json()
    assert {row["best"] for row in twin["rows"]} == {None}


def test_a_query_is_bounded(shared_http: TestClient) -> None:
    assert shared_http.get("/configurations", params={"query": "x" * 20_001}).status_code == 422
