"""What a search would cost, and whose command it runs, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import service.client
from hp_tool.catalog import library
from hp_tool.cli.main import build
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.ports import Store
from hp_tool.loop.tuning import tune
from hp_tool.loop.tuning.plan import plan_search
from hp_tool.questions import schema
from hp_tool.wording.bill import format_money
from tests.tuning.cpu_engine import CpuEngine

FORM = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": "8",
}
FORM |= {
    "training.sequence_length": "8192",
    "training.global_batch_size": "64",
    "search.budget_runs": "2",
}
Query = dict[str, Any]


class DescribedEngine(CpuEngine):
    """An engine that says what it would submit."""

    def describe(self, plan: LaunchPlan) -> str:
        return plan.job_name


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A trainer that the operator registered, under the name `ours`."""
    (tmp_path / "trainers").mkdir()
    entry = {"command": ["/opt/secret-train.py", "{flags:megatron-lm}"], "reader": "megatron-lm"}
    (tmp_path / "trainers" / "ours.yaml").write_text(yaml.safe_dump(entry))
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    library.clear_cache()
    yield "ours"
    library.clear_cache()


def test_a_plan_is_answered_and_nothing_is_queued(
    http: TestClient, store: Store, query: Query
) -> None:
    query["cluster"]["price_per_gpu_hour"] = 2.0
    query["search"] = {"budget_runs": 3, "fidelity": "full"}
    answer = http.post("/v1/plans", json=query)
    assert answer.status_code == 200, answer.text
    plan = answer.json()["plan"]
    assert (answer.json()["id"], answer.json()["job"], plan["runs"]) == ("small", None, 3)
    assert plan["first"]["num_gpus"] == 2 and plan["confirmation"] is None
    assert (
        plan["cost"] == pytest.approx(2.0 * plan["gpu_hours"])
        and plan["most_gpu_seconds"] > plan["gpu_seconds"]
    )
    assert not store.list_searches().items
    too_large = http.post("/v1/plans", json=query | {"model": "gpt3-175b"})
    assert (too_large.status_code, too_large.json()["code"]) == (422, "nothing_feasible")


def test_the_command_line_asks_a_server(
    http: TestClient, query: Query, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Asking:
        def __init__(self, *, server: str) -> None: ...

        def __enter__(self) -> Asking:
            return self

        def __exit__(self, *_: object) -> None: ...

        def plan(self, *, query: Query) -> Query:
            answer: Query = http.post("/v1/plans", json=query).json()
            return answer

    monkeypatch.setattr(service.client, "Client", Asking)
    (tmp_path / "query.json").write_text(json.dumps(query | {"search": {"budget_runs": 3}}))
    done = CliRunner().invoke(
        build(), ["tune", str(tmp_path / "query.json"), "--plan", "--server", "http://127.0.0.1:1"]
    )
    assert done.exit_code == 0, done.output
    assert "at most 3 runs (budget_runs)" in done.stdout and "#!/bin" not in done.stdout


def test_the_form_shows_the_bill(http: TestClient) -> None:
    plan = http.get("/searches/new.json", params=FORM).json()["plan"]
    assert plan["runs"] == 2 and plan["cost"] > 0
    page = http.get("/searches/new", params=FORM).text
    assert "Search cost" in page and " to ".join(map(format_money, plan["cost_interval"])) in page
    serving = {
        "kind": "inference",
        "model": "llama-3-8b",
        "cluster.gpu": "h100-sxm-80gb",
        "cluster.num_gpus": "8",
    }
    serving |= {
        "inference.input_length": "1000",
        "inference.output_length": "100",
        "inference.concurrency": "8",
    }
    answer = http.get("/searches/new.json", params=serving).json()
    assert (answer["error"], answer["plan"]) == (None, None)


def test_a_search_names_a_registered_trainer(
    http: TestClient, store: Store, query: Query, registered: str
) -> None:
    made = http.post("/v1/searches", json=query | {"trainer": registered})
    assert made.status_code == 202, made.text
    stored = store.get_search(search_id=made.json()["id"]).query
    assert (
        stored["trainer"] == registered and "secret" not in made.text
    )  # what it runs stays with the operator
    assert http.post("/v1/plans", json=query | {"trainer": registered}).status_code == 200
    unknown = http.post("/v1/searches", json=query | {"trainer": "theirs"})
    assert (unknown.status_code, unknown.json()["code"], unknown.json()["field"]) == (
        422,
        "not_found",
        "trainer",
    )
    (listed,) = http.get("/v1/trainers").json()["items"]
    assert listed == {
        "name": "ours",
        "reader": "megatron-lm",
        "launch": "torchrun",
        "axes": None,
        "reducible": [],
        "source": "",
    }
    assert f"<option>{registered}</option>" in http.get("/searches/new", params=FORM).text


def test_the_command_line_lists_registered_trainers_and_shows_their_command(
    registered: str,
) -> None:
    shown = [
        CliRunner().invoke(build(), ["trainers", *words])
        for words in ([], ["--json"], ["ours"], ["OURS", "--json"])
    ]
    assert [each.exit_code for each in shown] == [0] * 4, shown
    table, listed, fields, entry = (each.stdout for each in shown)
    assert "ours" in table and "megatron-lm" in table and "secret" not in table + listed
    assert [each["name"] for each in json.loads(listed)["items"]] == ["ours"]
    assert "/opt/secret-train.py" in fields and json.loads(entry)["command"] == [
        "/opt/secret-train.py",
        "{flags:megatron-lm}",
    ]


def test_a_bill_before_any_start_was_seen_is_an_interval(
    http: TestClient, store: Store, query: Query
) -> None:
    query["cluster"]["price_per_gpu_hour"] = 2.0
    query["search"] = {"budget_runs": 3, "fidelity": "full"}
    plan = http.post("/v1/plans", json=query).json()["plan"]
    for name in ("wall_s", "gpu_seconds", "cost"):
        low, high = plan[f"{name}_interval"]
        assert low < plan[name] < high, name
    assert (
        plan["most_gpu_seconds"] >= plan["gpu_seconds_interval"][1]
        and plan["most_cost"] >= plan["cost_interval"][1]
    )
    assert (
        plan["first"]["time_limit_s"] >= plan["first"]["wall_s_interval"][1]
        and plan["first"]["cut_off"] is False
    )
    page = http.get("/searches/new", params=FORM).text
    assert "this cluster has no runs yet" in page
    asked, engine = schema.parse_query(query), DescribedEngine(num_gpus=2)
    assert plan_search(asked, store=store, launcher=engine).plan.gpu_seconds_interval is not None
    tune(query=asked, store=store, launcher=engine)
    known = plan_search(asked, store=store, launcher=engine).plan
    assert (known.wall_s_interval, known.gpu_seconds_interval, known.cost_interval) == (
        None,
        None,
        None,
    )
    assert known.most_gpu_seconds >= known.gpu_seconds


def test_a_limit_below_what_a_run_needs_is_said(http: TestClient, query: Query) -> None:
    query["cluster"]["price_per_gpu_hour"] = 2.0
    query["search"] = {"budget_runs": 3, "fidelity": "full", "run_timeout_s": 5.0}
    plan = http.post("/v1/plans", json=query).json()["plan"]
    assert plan["first"]["cut_off"] is True and plan["first"]["time_limit_s"] == 5.0
    assert plan["most_gpu_seconds"] >= plan["gpu_seconds"] and plan["most_cost"] >= plan["cost"]
