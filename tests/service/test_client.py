"""The client against a real socket: typed answers, the library's errors, nothing lost on the
way.
"""

import json
import socket
import threading
from typing import Any

import httpx
import pytest

from hp_tool.cli.batches.answering import Task, answer_by_server
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError, HpToolError, InputError, NotFoundError, StoreError
from hp_tool.questions import schema
from service.api.views import EventView
from service.client import BATCH_BYTES, BATCH_LINES, Client
from tests.service.coordinator import claim, finish, one_run

Query = dict[str, Any]


def test_answers_are_the_librarys(server: str, query: Query) -> None:
    from hp_tool.questions import training

    with Client(server=server) as client:
        estimate = client.estimate(query=query)["estimate"]
        assert estimate == schema.to_dict(training.estimate(query=schema.parse_query(query)))
        assert len(client.recommend(query=query, top=2)["recommendations"]) == 2
        assert "cpu" in [row["name"] for row in client.catalog(kind="gpus")["items"]]
        assert "trl-1.7" in [row["name"] for row in client.catalog(kind="recipes")["items"]]


def test_errors_are_the_librarys(server: str, query: Query) -> None:
    with Client(server=server) as client:
        with pytest.raises(InputError, match="modle") as caught:
            client.estimate(query=query | {"modle": 1})
        assert (caught.value.code, caught.value.field) == ("unknown_key", "modle")
        with pytest.raises(NotFoundError):
            client.search(search_id="nope")
        with pytest.raises(NotFoundError):
            list(client.events(search_id="nope"))
        with pytest.raises(InputError, match="Nothing to change"):
            client.change_budget(search_id=client.submit_search(query=query).id)
        search = client.submit_search(query=query)
        client.cancel(search_id=search.id)
        with pytest.raises(ConflictError):
            client.resume(search_id=search.id)
    with pytest.raises(StoreError, match="does not respond") as away:
        Client(server="http://127.0.0.1:9").search(search_id="x")
    assert away.value.code == "server_unreachable"
    with pytest.raises(StoreError, match="does not respond"):
        list(Client(server="http://127.0.0.1:9").batch(lines=[b"{}"]))
    with pytest.raises(InputError):
        Client(server="file:///etc/passwd")


def test_a_batch_comes_back_in_order(server: str, query: Query) -> None:
    lines = (json.dumps(query | {"id": str(n)}).encode() for n in range(300))
    with Client(server=server) as client:
        assert [json.loads(line)["id"] for line in client.batch(lines=lines)] == [
            str(n) for n in range(300)
        ]


def test_a_batch_of_any_size_keeps_what_is_no_query_in_its_place(server: str, query: Query) -> None:
    wrong = InputError("not YAML", code="syntax")
    items = [
        wrong,
        *(json.dumps(query | {"id": str(n)}).encode() for n in range(BATCH_LINES)),
        wrong,
        b"{}",
        wrong,
    ]
    task = Task(name="estimate", top=1, calibration=False)
    answers = [json.loads(line) for line in answer_by_server(iter(items), task, server=server)]
    assert [answer["id"] for answer in answers] == [
        None,
        *map(str, range(BATCH_LINES)),
        None,
        None,
        None,
    ]
    codes = [answer["error"]["code"] for answer in answers if answer["status"] == "error"]
    assert codes == ["syntax", "syntax", "missing_field", "syntax"]


def test_a_batch_waits_where_the_key_has_asked_too_often() -> None:
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        if len(bodies) == 1:
            return httpx.Response(
                429,
                headers={"Retry-After": "0.01"},
                json={"detail": "too often", "code": "rate_limited"},
            )
        return httpx.Response(
            200, content=b'{"id": null}\n' * (bodies[-1].count(b"\n") - (len(bodies) == 4))
        )

    lines = [b"{}\n", b"  \n", b"x" * BATCH_BYTES, b"{}"]
    with Client(server="http://test", transport=httpx.MockTransport(answer)) as client:
        assert len(list(client.batch(lines=lines))) == 3
        assert bodies[0] == bodies[1] == b"{}\n" + lines[2] + b"\n"
        with pytest.raises(HpToolError, match="answered 0 of 1"):
            list(client.batch(lines=[b"{}"]))


def test_a_batch_is_answered_while_it_is_still_being_sent(server: str, query: Query) -> None:
    """A program that asks the next question only after the last answer is served too: nobody holds
    the whole.
    """
    line = json.dumps(query).encode() + b"\n"
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as wire:
        wire.sendall(
            b"POST /v1/batch HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        received = b""
        for asked in range(1, 4):
            wire.sendall(b"%x\r\n%s\r\n" % (len(line), line))
            while received.count(b'"status":"ok"') < asked:
                received += wire.recv(65536)
        wire.sendall(b"0\r\n\r\n")
        while not received.endswith(b"0\r\n\r\n"):
            received += wire.recv(65536)


def test_waiting_follows_every_event_to_the_result(server: str, store: Store, query: Query) -> None:
    seen: list[EventView] = []
    with Client(server=server) as client:
        search = client.submit_search(query=query)
        lease = claim(store, search.id)

        def work() -> None:
            one_run(store, lease, Measurement(status="ok", step_s=0.4))
            finish(store, lease)

        thread = threading.Timer(0.3, work)
        thread.start()
        result = client.wait(search_id=search.id, on_event=seen.append)
        thread.join()
        assert result["recommendations"][0]["rank"] == 1
        assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
        assert client.result(search_id=search.id) == result
        assert client.trials(search_id=search.id).trials[0].measurement is not None
        assert [view.id for view in client.searches(state="succeeded").items] == [search.id]


def test_a_search_that_failed_before_any_run_raises_as_it_would_here(
    server: str, store: Store, query: Query
) -> None:
    with Client(server=server) as client:
        search = client.submit_search(query=query).id
        error = {
            "code": "launcher_mismatch",
            "message": "no such GPU here",
            "field": "search.launcher",
        }
        store.finish_search(lease=claim(store, search), state=SearchState.FAILED, error=error)
        with pytest.raises(InputError, match="no such GPU here") as caught:
            client.wait(search_id=search)
        assert caught.value.code == "launcher_mismatch"


def test_a_search_waits_by_its_priority(server: str, store: Store, query: Query) -> None:
    with Client(server=server) as client:
        later, sooner = (
            client.submit_search(query=query, priority=priority).id for priority in (-5, 7)
        )
        with pytest.raises(InputError, match="at most 100"):
            client.submit_search(query=query, priority=101)
    claimed = [store.claim_search(holder="w", lease_s=60.0) for _ in range(2)]
    assert [claim[0].id for claim in claimed if claim] == [sooner, later]


def test_a_measurement_is_reported(server: str, query: Query) -> None:
    with Client(server=server) as client:
        report = {"query": query, "parallel": {}, "measurement": {"status": "ok", "step_s": 0.5}}
        stored = client.report_measurement(report=report)
        assert stored.measurement.step_s == 0.5
        assert [view.id for view in client.measurements(model="gpt-tiny").items] == [stored.id]


@pytest.mark.parametrize(
    "strange",
    ["../calibrations#", "../calibrations?", "..", ".", "", "a/b", "x?y", "%2e%2e", "ä b"],
)
def test_an_id_stays_one_part_of_the_path(server: str, strange: str) -> None:
    """It may come from a program's input, and must reach no other route."""
    with Client(server=server) as client:
        for call in (
            lambda: client.cancel(search_id=strange),
            lambda: client.search(search_id=strange),
            lambda: client.delete_measurement(measurement_id=strange),
            lambda: list(client.events(search_id=strange, patience_s=0.0)),
        ):
            with pytest.raises(NotFoundError):
                call()
        assert client.calibrations().items == []
