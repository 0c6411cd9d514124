"""What one client may take from the others: connections, streams, tries of a key, requests of many
keys; over sockets.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from hp_tool.domain.access import Scope
from hp_tool.store import SqlStore
from service import keys
from service.app import create_app
from service.http.protocol import BoundedProtocol
from service.settings import Settings
from tests.service.processes import served, wait_for

OPERATOR = "the operator's key"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def issued(store: SqlStore, owner: str = "ada") -> dict[str, str]:
    return bearer(keys.issue(store=store, owner=owner, scope=Scope.SUBMIT)[1])


def connected(url: str, *, local_address: str = "127.0.0.1") -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection(
        (address.hostname, address.port), timeout=10, source_address=(local_address, 0)
    )


def answer_to(url: str, local_address: str) -> httpx.Response:
    """Return the answer to a health check from this address."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=local_address)) as client:
        return client.get(f"{url}/healthz")


@pytest.mark.parametrize(
    "sent", ["", "GET /healthz HTT", "GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: 1\r\n"]
)
def test_a_connection_without_a_whole_request_is_closed(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr(BoundedProtocol, "headers_s", 0.2)
    with served(create_app(Settings(), store=store)) as url, connected(url) as slow:
        slow.sendall(sent.encode())
        assert slow.recv(1000) == b""
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_a_body_that_never_comes_is_given_up(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.asgi_body.MAX_PAUSE_S", 0.2)
    with served(create_app(Settings(), store=store)) as url, connected(url) as slow:
        slow.sendall(
            b"POST /v1/estimates HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"
        )
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_connections_have_a_cap(store: SqlStore) -> None:
    with served(
        create_app(Settings(max_connections=5, max_connections_per_address=5), store=store)
    ) as url:
        with ExitStack() as idle:
            for _ in range(5):
                idle.enter_context(connected(url))
            wait_for(lambda: httpx.get(f"{url}/healthz").status_code == 503)
        wait_for(lambda: httpx.get(f"{url}/healthz").status_code == 200)


def test_a_key_has_so_many_event_streams(store: SqlStore) -> None:
    ada, bob = issued(store), issued(store, "bob")
    with (
        served(create_app(Settings(api_key=OPERATOR, max_waiting_at_once=2), store=store)) as url,
        ExitStack() as opened,
    ):

        def stream(headers: dict[str, str]) -> httpx.Response:
            owner = "ada" if headers is ada else "bob"
            path = f"{url}/v1/searches/{searches[owner]}/events"
            return opened.enter_context(httpx.stream("GET", path, headers=headers, timeout=10))

        searches = {
            owner: store.create_search(query={}, owner=owner).id for owner in ("ada", "bob")
        }
        assert [stream(ada).status_code for _ in range(3)] == [200, 200, 429]
        assert stream(bob).status_code == 200
        assert httpx.get(f"{url}/v1/searches", headers=ada).status_code == 200


def test_wrong_keys_are_braked_and_known_ones_are_not(store: SqlStore) -> None:
    ada = issued(store)
    settings = Settings(api_key=OPERATOR, wrong_keys_per_second=0.2)
    with served(create_app(settings, store=store)) as url, httpx.Client(base_url=url) as http:
        assert http.get("/v1/searches", headers=ada).status_code == 200
        tried = [http.get("/v1/searches", headers=bearer(f"guess {number}")) for number in range(3)]
        assert [each.status_code for each in tried] == [401, 429, 429]
        assert (
            tried[1].json()["code"] == "too_many_wrong_keys"
            and int(tried[1].headers["Retry-After"]) >= 1
        )
        assert (
            http.get("/v1/searches", headers=bearer(OPERATOR)).status_code == 429
        )  # or guesses would be heard
        assert http.get("/v1/searches", headers=ada).status_code == 200


def test_many_keys_of_an_owner_send_no_more_than_the_owner_may(store: SqlStore) -> None:
    settings = Settings(
        api_key=OPERATOR, requests_per_second=0.2, requests_per_second_per_owner=0.4
    )
    several, bob = [issued(store) for _ in range(4)], issued(store, "bob")
    with served(create_app(settings, store=store)) as url:
        statuses = [
            httpx.get(f"{url}/v1/searches", headers=each).status_code for each in (*several, bob)
        ]
    assert statuses == [200, 200, 429, 429, 200]


def test_a_refused_use_of_a_revoked_key_is_audited_once_a_minute(store: SqlStore) -> None:
    record, token = keys.issue(store=store, owner="ada", scope=Scope.SUBMIT)
    store.revoke_key(key_id=record.id)
    with served(create_app(Settings(api_key=OPERATOR), store=store)) as url:
        statuses = {
            httpx.get(f"{url}/v1/searches", headers=bearer(token)).status_code for _ in range(3)
        }
        assert statuses == {401}
        rows = httpx.get(f"{url}/v1/audit", headers=bearer(OPERATOR)).json()["items"]
    assert [(row["api_key_id"], row["owner"], row["outcome"]) for row in rows] == [
        (record.id, "ada", "401")
    ]


LIMIT = 64 * 1024
ENDLESS = {
    "one header": (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: ", b"x" * 4096),
    "many headers": (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"X-Many: 1\r\n" * 400),
    "a path": (b"GET /healthz?", b"x" * 4096),
    "trailers": (
        b"POST /v1/estimates HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        b"X-Many: 1\r\n" * 400,
    ),
    "a trailer": (
        b"POST /v1/estimates HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Long: ",
        b"x" * 4096,
    ),
    "headers after a request": (
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nX-Long: ",
        b"x" * 4096,
    ),
}


@pytest.mark.parametrize("endless", ENDLESS)
def test_headers_have_a_limit_whoever_sends_them(store: SqlStore, endless: str) -> None:
    """The server hangs up long before it has taken what memory could hold."""
    begin, more = ENDLESS[endless]
    with (
        served(create_app(Settings(api_key=OPERATOR), store=store)) as url,
        connected(url) as sender,
    ):
        sender.sendall(begin)
        sent = 0
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            while sent < 32 * 2**20:
                sender.sendall(more)
                sent += len(more)
        assert sent < 16 * 2**20, "what lies in the sockets' own buffers is at most so much"


def test_ordinary_headers_and_large_bodies_pass(store: SqlStore) -> None:
    with (
        served(create_app(Settings(api_key=OPERATOR), store=store)) as url,
        httpx.Client(base_url=url) as client,
    ):
        cookies = {"Cookie": "c=" + "x" * 8000, **bearer(OPERATOR)}
        for _ in range(3):  # over one connection
            assert client.get("/v1/models", headers=cookies, params={"limit": 1}).status_code == 200
            assert (
                client.post(
                    "/v1/estimates", headers=cookies, content=b" " * 900_000 + b"{}"
                ).status_code
                == 422
            )
        too_long = client.get("/healthz", headers={"Cookie": "c=" + "x" * (LIMIT + 1)})
    assert too_long.status_code == 431
    assert too_long.json()["code"] == "headers_too_large" and "64 KiB" in too_long.json()["detail"]


def test_one_address_does_not_shut_the_others_out(store: SqlStore) -> None:
    """1010 idle connections of one address; default settings."""
    with served(create_app(Settings(), store=store)) as url, ExitStack() as idle:
        for _ in range(1010):
            idle.enter_context(connected(url))
        assert answer_to(url, "127.0.0.2").status_code == 200


def test_two_addresses_do_not_shut_the_others_out(store: SqlStore) -> None:
    """Of 40 connections one address has 20, the next 12, and the last 8 are for addresses with few
    of their own.
    """
    with served(create_app(Settings(max_connections=40), store=store)) as url, ExitStack() as idle:
        for local_address in ("127.0.0.2", "127.0.0.3"):
            for _ in range(40):
                idle.enter_context(connected(url, local_address=local_address))
        wait_for(lambda: answer_to(url, "127.0.0.3").status_code == 503, timeout_s=10)
        refused = answer_to(url, "127.0.0.3").json()
        assert (
            refused["code"] == "too_many_connections" and "HP_MAX_CONNECTIONS" in refused["detail"]
        )
        for _ in range(3):
            idle.enter_context(connected(url, local_address="127.0.0.4"))
        assert answer_to(url, "127.0.0.4").status_code == 200
        assert answer_to(url, "127.0.0.5").status_code == 200


def test_an_address_has_a_cap_of_its_own_and_is_told(store: SqlStore) -> None:
    settings = Settings(max_connections_per_address=3)
    with served(create_app(settings, store=store)) as url:
        with ExitStack() as idle:
            for _ in range(3):
                idle.enter_context(connected(url))
            wait_for(lambda: httpx.get(f"{url}/healthz").status_code == 503)
            refused = httpx.get(f"{url}/healthz")
            assert (
                refused.json()["code"] == "too_many_connections"
                and "HP_MAX_CONNECTIONS_PER_ADDRESS" in refused.text
            )
        wait_for(lambda: httpx.get(f"{url}/healthz").status_code == 200)
