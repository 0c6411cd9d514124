"""Editions side by side: what a search is stored as, and what an older worker does beside a newer
edition.
"""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from hp_tool.store import SqlStore, open_store, schema
from hp_tool.store.engine import create_engine
from tests.service.editions import NOVELTY, THIS, expected_step_s, newer, quick_trainer
from tests.service.processes import wait_for

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": {
        "name": "gpt-tiny",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
    "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
    "parallel": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "micro_batch_size": [1, 2],
        "zero_stage": [0, 1],
        "recompute": "none",
    },
    "search": {
        "budget_runs": 2,
        "run_timeout_s": 1800.0,
        "min_gain_fraction": 0.0,
        "preflight": False,
    },
    "trainer": "quick",
}
REGISTERED = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 512,
}


def test_a_search_is_stored_as_asked(http: TestClient, query: dict[str, Any]) -> None:
    """No default joins it, which an older worker might not know; one that was written stays, a
    registered name becomes what stands under it.
    """
    query["training"]["framework"] = "megatron-core"  # its default, but written
    made = http.post("/v1/searches", json=query).raise_for_status().json()
    assert made["query"] == query
    assert http.get(f"/v1/searches/{made['id']}").json()["query"] == query
    assert http.post("/v1/models", json={"name": "mine", "spec": REGISTERED}).status_code == 201
    named = query | {"model": "mine"}
    stored = http.post("/v1/searches", json=named).raise_for_status().json()["query"]
    assert stored == named | {"model": REGISTERED | {"name": "mine"}}


def test_the_budget_that_nobody_asked_for_is_the_default(
    http: TestClient, query: dict[str, Any]
) -> None:
    del query["search"]["budget_runs"]
    made = http.post("/v1/searches", json=query).raise_for_status().json()
    assert "budget_runs" not in made["query"]["search"]
    assert http.get(f"/searches/{made['id']}.json").json()["budget_runs"] == 8


def test_a_command_line_sends_what_was_asked(
    server: str, store: SqlStore, query: dict[str, Any], tmp_path: Path
) -> None:
    import json

    (tmp_path / "query.json").write_text(json.dumps(query))
    command = ["tune", str(tmp_path / "query.json"), "--server", server]
    with THIS.process(
        *command, database_url=f"sqlite:///{tmp_path / 'none.sqlite3'}", home=tmp_path
    ) as (tuning, log):
        wait_for(lambda: store.list_searches().items or tuning.poll() is not None)
        (record,) = store.list_searches().items
        store.request_cancel(search_id=record.id)
        tuning.wait(timeout=60)
    assert record.query == query, log.read_text()


@pytest.mark.long
@pytest.mark.components
def test_a_request_is_told_by_its_key_in_another_edition(tmp_path: Path) -> None:
    """The same body and key answer the same search and measurement, whatever defaults joined them;
    another body does not.
    """
    url, headers = f"sqlite:///{tmp_path / 'hp.sqlite3'}", {"Idempotency-Key": "one"}
    quick_trainer(tmp_path / "catalog", go=tmp_path / "go")
    report = {
        "query": {
            name: value
            for name, value in QUERY.items()
            if name not in ("parallel", "search", "trainer")
        },
        "parallel": {"tensor_parallel_size": 2},
        "measurement": {"status": "ok", "step_s": 0.25},
    }
    sent = {
        "searches": (QUERY, QUERY | {"id": "another"}),
        "measurements": (report, report | {"parallel": {}}),
    }
    answers: dict[str, set[str]] = {path: set() for path in sent}
    for edition in (THIS, newer(tmp_path / "newer")):
        with edition.api(database_url=url, home=tmp_path) as api:
            for path, (body, other) in sent.items():
                answer = httpx.post(f"{api}/v1/{path}", json=body, headers=headers, timeout=30)
                assert answer.is_success, answer.text
                answers[path].add(answer.json()["id"])
                refused = httpx.post(f"{api}/v1/{path}", json=other, headers=headers, timeout=30)
                assert (refused.status_code, refused.json()["code"]) == (
                    409,
                    "idempotency_key_reused",
                )
    assert [len(ids) for ids in answers.values()] == [1, 1]


@pytest.mark.components
@pytest.mark.long
def test_different_editions_work_together(tmp_path: Path) -> None:
    """It says so once, finishes what it has, and stops; the newer worker takes the search."""
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    go = tmp_path / "go"
    quick_trainer(tmp_path / "catalog", go=go)
    new = newer(tmp_path / "newer")
    running = {"database_url": url, "home": tmp_path}
    with ExitStack() as stack:
        api = stack.enter_context(new.api(**running))
        first = (
            httpx.post(f"{api}/v1/searches", json=QUERY, timeout=30).raise_for_status().json()["id"]
        )
        # Nothing new is asked of it, and its edition is the newer one's: it might mean something
        # else there.
        later = copy.deepcopy(QUERY)
        later["search"][NOVELTY] = 3
        _as_this_editions(url, first)
        worker, log = stack.enter_context(THIS.process("worker", "--searches", "2", **running))
        with closing(open_store(url)) as store:
            wait_for(lambda: store.get_search(search_id=first).state == "running")
            second = (
                httpx.post(f"{api}/v1/searches", json=later, timeout=30)
                .raise_for_status()
                .json()["id"]
            )
            wait_for(lambda: "newer" in log.read_text())
            time.sleep(3)
            assert worker.poll() is None, log.read_text()  # it has a search yet
            assert [store.get_search(search_id=each).state for each in (first, second)] == [
                "running",
                "queued",
            ]
            go.touch()
            worker.wait(timeout=60)
            assert worker.returncode == 0
            assert [store.get_search(search_id=each).state for each in (first, second)] == [
                "succeeded",
                "queued",
            ]
            lines = [line for line in log.read_text().splitlines() if "newer" in line]
            assert (
                len(lines) == 1
                and second in lines[0]
                and "install" in lines[0]
                and "db upgrade" not in lines[0]
            )
            stack.enter_context(new.process("worker", **running))
            wait_for(lambda: store.get_search(search_id=second).state.ended)
            assert store.get_search(search_id=second).state == "succeeded"
            for run in store.runs(search_id=second):
                assert run.measurement is not None and run.measurement.step_s == expected_step_s(
                    run.parallel
                )
    refused = THIS.run("tune", "--resume", _stored(url, later, edition=1_000_000), **running)
    assert refused.returncode != 0 and "install" in refused.stderr, refused.stderr


@pytest.mark.components
@pytest.mark.parametrize(
    "place",
    ["sqlite", pytest.param("postgresql", marks=[pytest.mark.components, pytest.mark.long])],
)
def test_a_worker_older_than_the_schema_takes_nothing_new(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    url = (
        request.getfixturevalue("postgres_url")
        if place == "postgresql"
        else f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    )
    go = tmp_path / "go"
    quick_trainer(tmp_path / "catalog", go=go)
    schema.upgrade(url)
    running = {"database_url": url, "home": tmp_path}
    with closing(open_store(url)) as store:
        first = store.create_search(query=QUERY).id
        with THIS.process("worker", "--searches", "2", **running) as (worker, log):
            wait_for(lambda: store.get_search(search_id=first).state == "running")
            _set_revision(url, "9999")
            second = store.create_search(query=QUERY).id
            wait_for(lambda: "newer" in log.read_text())
            go.touch()
            worker.wait(timeout=60)
        assert [store.get_search(search_id=each).state for each in (first, second)] == [
            "succeeded",
            "queued",
        ]
        lines = [line for line in log.read_text().splitlines() if "newer" in line]
        assert len(lines) == 1 and "install" in lines[0] and "db upgrade" not in lines[0], lines
    again = THIS.run("worker", **running)
    assert (
        again.returncode != 0 and "install" in again.stderr and "db upgrade" not in again.stderr
    ), again.stderr


def _set_revision(url: str, revision: str) -> None:
    _execute(url, f"UPDATE {schema.VERSION_TABLE} SET version_num = '{revision}'")


def _as_this_editions(url: str, search_id: str) -> None:
    """Have a search be one that every edition may take, as those stored before."""
    _execute(url, f"UPDATE hp_searches SET edition = NULL WHERE id = '{search_id}'")


def _stored(url: str, query: dict[str, Any], *, edition: int) -> str:
    with closing(open_store(url)) as store:
        return store.create_search(query=query, paused=True, edition=edition).id


def _execute(url: str, statement: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(statement))
    engine.dispose()
