"""Webhooks: told over a real socket until they are taken."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.domain.states import SearchState
from hp_tool.domain.webhooks import OVERDUE_S
from hp_tool.store import SqlStore, tables
from service.app import create_app
from service.settings import Settings
from service.webhooks import verify
from service.webhooks.delivery import (
    Deliveries,
    DeliveryError,
    message,
    message_id,
    send_message,
    warn_of_overdue,
)
from tests.service.coordinator import claim, finish
from tests.service.processes import process, served, wait_for
from tests.service.webhook_receiver import HERE, PUBLIC, SECRET, Receiver


@pytest.fixture
def hooked(store: SqlStore) -> Iterator[TestClient]:
    with TestClient(
        create_app(Settings(webhooks=HERE), store=store), base_url="http://127.0.0.1:8000"
    ) as client:
        yield client


def test_an_end_is_told_until_it_is_taken(
    hooked: TestClient,
    store: SqlStore,
    query: dict[str, Any],
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hp_tool.store.webhooks.wait_s", lambda *, attempt: 0.05)
    receiver.statuses = [503, 302]
    search = hooked.post("/v1/searches", json=query, params={"webhook": receiver.url}).json()["id"]
    stopping = threading.Event()
    worker = threading.Thread(
        target=Deliveries(store=store, settings=HERE, stopping=stopping, poll_s=0.02).run
    )
    worker.start()
    try:
        pending = hooked.get(f"/v1/searches/{search}/webhook").json()
        assert (pending["state"], pending["attempts"], receiver.came) == ("pending", 0, [])
        finish(store, claim(store, search))
        deadline = time.monotonic() + 10
        while (told := hooked.get(f"/v1/searches/{search}/webhook").json())["state"] == "pending":
            assert time.monotonic() < deadline, told
            time.sleep(0.02)
    finally:
        stopping.set()
        worker.join()
    assert (told["state"], told["attempts"], told["last_error"], told["next_attempt_at"]) == (
        "delivered",
        3,
        None,
        None,
    )
    assert [path for path, _, _ in receiver.came] == ["/hook?token=t"] * 3
    for _, headers, body in receiver.came:
        verify(secret=SECRET, headers=headers, body=body)
    assert len({headers["webhook-id"] for _, headers, _ in receiver.came}) == 1
    content = json.loads(receiver.came[-1][2])
    assert (content["type"], content["data"]["search_id"], content["data"]["state"]) == (
        "search.ended",
        search,
        "succeeded",
    )
    assert hooked.get(content["data"]["result"]).json()["status"] == "ok"
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text(encoding="utf-8")
    shown = json.loads(page.split("```json\n", 1)[1].split("```", 1)[0])
    assert (list(shown), list(shown["data"])) == (list(content), list(content["data"]))


def test_what_fails_is_kept_and_told(
    store: SqlStore, query: dict[str, Any], receiver: Receiver
) -> None:
    receiver.statuses = [302]
    search = store.create_search(query=query, webhook=receiver.url)
    store.request_cancel(search_id=search.id)
    deliveries = Deliveries(store=store, settings=HERE, stopping=threading.Event())
    assert deliveries.step()
    assert not deliveries.step()  # the next attempt is not due
    assert store.get_webhook(search_id=search.id).last_error == "HTTP status 302"
    assert len(receiver.came) == 1
    refused = store.create_search(
        query=query, webhook=receiver.url
    )  # by settings that have changed since
    store.request_cancel(search_id=refused.id)
    assert Deliveries(store=store, settings=PUBLIC, stopping=threading.Event()).step()
    assert "https" in str(store.get_webhook(search_id=refused.id).last_error)
    assert len(receiver.came) == 1


def test_a_message_is_small_whatever_went_wrong(store: SqlStore, query: dict[str, Any]) -> None:
    search = store.create_search(query=query | {"id": "é" * 5000})
    error = {"code": "x", "message": "m" * 100_000, "field": None}
    failed = store.finish_search(
        lease=claim(store, search.id), state=SearchState.FAILED, error=error
    )
    content = json.loads(message(failed))
    assert len(message(failed)) < 10_000
    assert content["data"]["error"] == {"code": "x", "message": "m" * 1000, "field": None}
    assert message_id(failed).startswith(search.id)


def test_silent_receivers_of_one_owner_hold_up_nobody_else(
    store: SqlStore, query: dict[str, Any], receiver: Receiver
) -> None:
    searches = [
        (store.create_search(query=query, owner="ada", webhook="https://silent.example/"), "ada")
        for _ in range(12)
    ]
    searches.append((store.create_search(query=query, owner="bob", webhook=receiver.url), "bob"))
    for search, _ in searches:
        store.request_cancel(search_id=search.id)
    silence, sending = threading.Semaphore(0), []

    def send(url: Any, **message: Any) -> None:
        if url.host == "silent.example":
            sending.append(url)
            silence.acquire()
            sending.remove(url)
            raise DeliveryError("silent")
        send_message(url, **message)

    stopping = threading.Event()
    deliveries = Deliveries(store=store, settings=HERE, stopping=stopping, poll_s=0.02, send=send)
    worker = threading.Thread(target=deliveries.run)
    worker.start()
    try:
        wait_for(lambda: store.get_webhook(search_id=searches[-1][0].id).state == "delivered")
        assert len(sending) == 2  # of the twelve
        for _ in range(12):
            silence.release()
        wait_for(
            lambda: (
                all(store.get_webhook(search_id=search.id).attempts == 1 for search, _ in searches)
                and not sending
            )
        )
    finally:
        stopping.set()
        silence.release(100)
        worker.join()


def test_a_workers_process_tells(
    store: SqlStore,
    query: dict[str, Any],
    receiver: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HP_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("HP_WEBHOOK_NETWORKS", "127.0.0.0/8")
    search = store.create_search(query=query, webhook=receiver.url)
    store.request_cancel(search_id=search.id)
    with process("worker", database_url=f"sqlite:///{tmp_path / 'hp.sqlite3'}", home=tmp_path):
        wait_for(lambda: store.get_webhook(search_id=search.id).delivered_at)
    assert store.get_webhook(search_id=search.id).attempts == 1
    assert json.loads(receiver.came[0][2])["data"]["state"] == "cancelled"


def test_webhooks_over_http(http: TestClient, hooked: TestClient, query: dict[str, Any]) -> None:
    def refused(client: TestClient, url: str) -> tuple[int, str, str]:
        answer = client.post("/v1/searches", json=query, params={"webhook": url})
        return answer.status_code, answer.json()["code"], answer.json()["field"]

    assert refused(http, "https://example.com/") == (422, "webhooks_disabled", "webhook")
    assert refused(hooked, "https://10.0.0.1/") == (422, "webhook_refused", "webhook")
    assert refused(hooked, "https://example.com/" + "x" * 2000)[::2] == (422, "webhook")
    assert http.get("/v1/searches").json()["items"] == []
    plain = http.post("/v1/searches", json=query).json()["id"]
    assert http.get(f"/v1/searches/{plain}/webhook").status_code == 404
    assert http.get("/v1/searches/nope/webhook").status_code == 404


def long_ago(store: SqlStore, column: sa.Column[Any]) -> None:
    """As if that had been some time ago, in every row."""
    with store._writing() as connection:
        values = {column.name: datetime.now(UTC) - timedelta(seconds=2 * OVERDUE_S)}
        connection.execute(sa.update(column.table).values(values))


def test_deliveries_are_counted(
    http: TestClient, store: SqlStore, query: dict[str, Any], receiver: Receiver
) -> None:
    def counted() -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        (webhooks,) = (family for family in families if family.name == "hp_webhooks")
        return {sample.labels["state"]: sample.value for sample in webhooks.samples}

    search = store.create_search(query=query, webhook=receiver.url)
    assert counted() == {"pending": 0, "delivered": 0, "failed": 0}  # it has not ended
    store.request_cancel(search_id=search.id)
    assert counted() == {"pending": 1, "delivered": 0, "failed": 0}
    assert Deliveries(store=store, settings=HERE, stopping=threading.Event()).step()
    assert counted() == {"pending": 0, "delivered": 1, "failed": 0}


def test_what_nobody_tells_is_told_to_the_operator(
    http: TestClient,
    store: SqlStore,
    query: dict[str, Any],
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopping = threading.Event()
    search = store.create_search(query=query, webhook=receiver.url).id
    long_ago(store, tables.webhooks.c.next_attempt_at)
    assert not store.state().overdue_webhooks  # it has not ended
    store.request_cancel(search_id=search)
    assert not store.state().overdue_webhooks  # nor has its worker had the time to tell
    long_ago(store, tables.searches.c.finished_at)
    with caplog.at_level(logging.WARNING):
        warn_of_overdue(store=store, stopping=stopping, check_interval_s=0.01)
    (record,) = caplog.records
    assert (
        "1 webhooks are overdue" in record.getMessage()
        and "HP_WEBHOOK_SECRET" in record.getMessage()
    )
    ready = http.get("/readyz")
    check = next(check for check in ready.json()["checks"] if check["name"] == "webhooks")
    assert (ready.status_code, check["status"]) == (200, "warning")
    assert "HP_WEBHOOK_SECRET" in check["fix"]
    assert Deliveries(store=store, settings=HERE, stopping=stopping).step()
    assert store.state().overdue_webhooks == 0


def test_tune_hands_a_webhook_to_the_server(
    server: str, store: SqlStore, query: dict[str, Any], receiver: Receiver, tmp_path: Path
) -> None:
    file = tmp_path / "query.json"
    file.write_text(json.dumps(query))

    def tuned(*flags: str) -> tuple[int, str]:
        done = CliRunner().invoke(build(), ["tune", str(file), "--webhook", receiver.url, *flags])
        return done.exit_code, done.output + str(done.exception or "")

    code, said = tuned()  # nobody is there to tell
    assert code != 0 and "--server" in said
    code, said = tuned("--server", server)
    assert code != 0 and "HP_WEBHOOK_SECRET" in said
    assert store.list_searches().items == ()

    def work() -> None:
        wait_for(lambda: store.list_searches().items)
        finish(store, claim(store, store.list_searches().items[0].id))

    with served(create_app(Settings(webhooks=HERE, poll_s=0.02), store=store)) as telling:
        worker = threading.Thread(target=work)
        worker.start()
        code, said = tuned("--server", telling)
        worker.join()
    assert code == 0, said
    assert store.get_webhook(search_id=store.list_searches().items[0].id).url == receiver.url
