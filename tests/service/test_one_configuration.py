"""A configuration that a ranking answers is the same one on every page, behind every link, in JSON,
on the command line and in an export: with the offload that nothing fits without, and the
communication it was predicted with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fastapi.testclient import TestClient

from hp_tool import catalog
from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings
from tests.command_line import hp_tool

SIZES = (8, 16, 64, 256)
GPU = "h100-sxm-80gb"
SAMPLE = [
    ("llama-3-70b", 16),
    pytest.param("llama-3-8b", 8, marks=pytest.mark.components),
]
"""One that fits nowhere without offload, and one that does."""
OFFLOADED = {
    "optimizer": r"--optimizer-cpu-offload",
    "activations": r"--cpu-offloading|--fine-grained-activation-offloading",
}


FREE = ("training.cuda_graphs", "training.cross_entropy", "training.overlap")
"""Knobs that a ranking takes where they save something."""


def query_of(model: str, num_gpus: int) -> dict[str, Any]:
    length = min(catalog.model(model).max_position_embeddings or 8192, 8192)
    return {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": GPU, "num_gpus": num_gpus},
        "training": {"sequence_length": length, "global_batch_size": 512},
    }


def explorer_of(http: TestClient, query: dict[str, Any]) -> dict[str, Any]:
    asked = {
        "model": query["model"],
        **{f"cluster.{name}": value for name, value in query["cluster"].items()},
        **{f"training.{name}": value for name, value in query["training"].items()},
    }
    page: dict[str, Any] = http.get("/explorer.json", params=asked).json()
    return page


def page_at(http: TestClient, href: str) -> dict[str, Any]:
    """The page behind a link."""
    path, _, parameters = href.partition("?")
    page: dict[str, Any] = http.get(f"{path}.json?{parameters}").json()
    assert page["error"] is None, page["error"]
    return page


def figures(view: dict[str, Any]) -> tuple[float, float]:
    metrics = {metric["name"]: metric["value"] for metric in view["metrics"]}
    return metrics["Step time"], metrics["Memory"]


def check(http: TestClient, model: str, num_gpus: int) -> None:
    """One thing is said of rank 1, and of each other row that a page lists, wherever it is said."""
    query = query_of(model, num_gpus)
    answer = http.post("/v1/recommendations", json=query).json()
    page = explorer_of(http, query)
    started = http.get("/searches/new.json", params=form_of(query)).json()
    if answer["status"] != "ok":  # what no framework runs
        assert answer["code"] == "unsupported"
        assert answer["detail"] == page["error"]["message"] == started["error"]["message"]
        return
    rows = answer.get("recommendations", [])
    if not rows:
        check_misses(answer, page=page, started=started)
        return
    best, offload = rows[0], rows[0]["estimate"]["provenance"]["assumed"].get("training.offload")
    step_s, size = best["estimate"]["time"]["step_s"], best["estimate"]["memory"]["total_bytes"]
    of_memory = {path: value for path, value in best["set"].items() if path not in FREE}
    assert of_memory == ({} if offload is None else {"training.offload": offload})
    once = pytest.approx((step_s, size), rel=1e-9)
    unmeasured = best["estimate"]["familiarity"]["unmeasured"]
    view, first, shown = page["view"], page["rows"][0], started["best"]
    assert view["verdict"] != "does not fit" and view["feasible"] and figures(view) == once
    assert first["chosen"] and (first["step_s"], first["memory_bytes"]) == once
    assert (shown["step_s"], shown["memory_bytes"]) == once
    assert view["unmeasured"] == first["unmeasured"] == shown["unmeasured"] == unmeasured
    assert view["details"] == first["details"] == shown["details"]
    assert offload is None or f"offload {offload}" in view["details"]
    for row in page["rows"]:
        for href in (row["href"], row["settings_href"]):
            there = page_at(http, href)["view"]
            assert (
                there["feasible"]
                and there["heading"] == row["arithmetic"]
                and there["details"] == row["details"]
            ), href
            assert figures(there) == pytest.approx((row["step_s"], row["memory_bytes"]), rel=1e-9)
    for href in (shown["href"], page["configuration_href"]):
        there = page_at(http, href)
        assert figures(there["view"]) == once and there["view"]["unmeasured"] == unmeasured
        text = parse_qs(urlsplit(href).query)["query"][0]
        again = http.post("/v1/estimates", json=json.loads(text)).json()["estimate"]
        assert (
            again["feasible"] and (again["time"]["step_s"], again["memory"]["total_bytes"]) == once
        )
        assert again["intervals"] == best["estimate"]["intervals"]
    exported = http.post(
        "/v1/exports",
        json={"format": "megatron-lm", "result": {"query": query, "recommendations": [best]}},
    )
    if exported.status_code == 200:
        assert bool(
            re.search(OFFLOADED.get(offload or "", "offload"), exported.json()["text"])
        ) == (offload is not None)


def check_misses(answer: dict[str, Any], *, page: dict[str, Any], started: dict[str, Any]) -> None:
    """Where nothing fits, every door says so and names the same nearest misses."""
    assert (
        answer["status"] == "ok"
        and page["nothing_fits"]
        and started["best"] is None
        and not page["view"]["feasible"]
    )
    estimates = [miss["estimate"] for miss in answer["nearest_misses"]]
    sizes = [estimate["memory"]["total_bytes"] for estimate in estimates]
    assert sizes and [row["memory_bytes"] for row in page["rows"]] == pytest.approx(sizes, rel=1e-9)
    assert {row["fit"] for row in page["rows"]} == {"does not fit"}


def form_of(query: dict[str, Any]) -> dict[str, str]:
    sections = {"cluster": query["cluster"], "training": query["training"]}
    fields = {
        f"{section}.{key}": str(value)
        for section, each in sections.items()
        for key, value in each.items()
    }
    return {"kind": "training", "model": query["model"], **fields}


@pytest.mark.parametrize(("model", "num_gpus"), SAMPLE)
def test_a_ranked_configuration_is_the_same_everywhere(
    shared_http: TestClient, model: str, num_gpus: int
) -> None:
    check(shared_http, model, num_gpus)


@pytest.fixture(scope="module")
def patient_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A service that ranks the largest spaces of the catalogue too, on a busy machine."""
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('patient') / 'hp.sqlite3'}")
    with TestClient(
        create_app(Settings(max_cpu_s=120.0), store=store), base_url="http://127.0.0.1:8000"
    ) as client:
        yield client
    store.close()


@pytest.mark.long
@pytest.mark.parametrize("num_gpus", SIZES)
@pytest.mark.parametrize("model", catalog.names("models"))
def test_every_model_of_the_catalogue_is_the_same_everywhere(
    patient_http: TestClient, model: str, num_gpus: int
) -> None:
    check(patient_http, model, num_gpus)


def command(*arguments: str) -> str:
    done = hp_tool(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_says_what_pages_say(shared_http: TestClient, tmp_path: Path) -> None:
    query = query_of("llama-3-70b", 16)
    (tmp_path / "query.json").write_text(json.dumps(query))
    printed = command("recommend", str(tmp_path / "query.json"), "--json")
    (tmp_path / "result.json").write_text(printed)
    best = json.loads(printed)["recommendations"][0]
    asked = shared_http.post("/v1/recommendations", json=query).json()["recommendations"][0]
    assert {name: best[name] for name in ("parallel", "set")} == {
        name: asked[name] for name in ("parallel", "set")
    }
    assert "training.offload: optimizer" in command("recommend", str(tmp_path / "query.json"))
    assert "--optimizer-cpu-offload" in command(
        "export", str(tmp_path / "result.json"), "--format", "megatron-lm"
    )
    assert "--optimizer-cpu-offload" in command(
        "export", str(tmp_path / "query.json"), "--format", "megatron-lm"
    )


def test_the_communication_that_a_ranking_chose_is_exported(tmp_path: Path) -> None:
    query = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": GPU, "num_gpus": 64},
        "training": {"sequence_length": 131072, "global_batch_size": 64},
        "parallel": {"context_parallel_size": 16},
    }
    (tmp_path / "query.json").write_text(json.dumps(query))
    (tmp_path / "result.json").write_text(
        command("recommend", str(tmp_path / "query.json"), "--json", "--top", "3")
    )
    rows = json.loads((tmp_path / "result.json").read_text())["recommendations"]
    for source, rank in (
        ("result.json", 2),
        ("query.json", 2),
        ("result.json", 3),
        ("query.json", 3),
    ):
        row = rows[rank - 1]["parallel"]
        assert row["context_parallel_communication"] == "a2a+p2p"
        sizes = " ".join(map(str, row["hierarchical_context_parallel_sizes"]))
        text = command(
            "export", str(tmp_path / source), "--format", "megatron-lm", "--rank", str(rank)
        )
        assert (
            "--cp-comm-type a2a+p2p" in text
            and f"--hierarchical-context-parallel-sizes {sizes}" in text
        )


def test_the_fewest_devices_stand_in_the_row_and_its_configuration(shared_http: TestClient) -> None:
    query = query_of("llama-3-8b", 64) | {"objective": "min_gpus"}
    best = shared_http.post("/v1/recommendations", json=query).json()["recommendations"][0]
    assert best["set"]["cluster.num_gpus"] == best["estimate"]["provenance"]["num_gpus"] < 64
    shown = shared_http.get(
        "/searches/new.json", params=form_of(query) | {"objective": "min_gpus"}
    ).json()["best"]
    there = page_at(shared_http, shown["href"])["view"]
    assert there["feasible"] and there["heading"] == shown["arithmetic"]
    assert figures(there)[0] == pytest.approx(best["estimate"]["time"]["step_s"], rel=1e-9)


def test_a_value_of_a_list_is_the_rows_own(shared_http: TestClient) -> None:
    query = query_of("llama-3-8b", 8)
    query["training"]["precision"] = ["bf16", "fp8"]
    rows = shared_http.post("/v1/recommendations", json=query, params={"top": 4}).json()[
        "recommendations"
    ]
    assert {row["set"]["training.precision"] for row in rows} <= {"bf16", "fp8"}
    export = {"format": "megatron-lm", "result": {"query": query, "recommendations": rows}}
    for rank, row in enumerate(rows, start=1):
        text = shared_http.post("/v1/exports", json=export | {"rank": rank}).json()["text"]
        assert ("--fp8-format" in text) == (row["set"]["training.precision"] == "fp8")
