"""Compressed answers: which are, that they read the same, and that streams are not held back."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator

import httpx
import pytest
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from hp_tool.store import SqlStore
from service.app import create_app
from service.http.compression import Compression
from service.settings import Settings
from tests.service.processes import served

QUERY = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
}


@pytest.fixture
def http(store: SqlStore) -> Iterator[TestClient]:
    with TestClient(
        create_app(Settings(), store=store), base_url="http://127.0.0.1:8000"
    ) as client:
        yield client


@pytest.mark.parametrize("path", ["/gpus", "/v1/models", "/v1/gpus", "/gpus.json"])
def test_answers_to_reading_requests_are_compressed_for_those_who_accept_it(
    http: TestClient, path: str
) -> None:
    plain = http.get(path, headers={"Accept-Encoding": "identity"})
    small = http.get(path, headers={"Accept-Encoding": "gzip"})
    assert (plain.headers.get("content-encoding"), small.headers["content-encoding"]) == (
        None,
        "gzip",
    )
    assert "Accept-Encoding" in small.headers["vary"] and "Accept-Encoding" in plain.headers["vary"]
    assert small.content == plain.content
    assert 3 * int(small.headers["content-length"]) < len(plain.content)


def test_a_compressed_answer_has_the_tag_of_the_plain_one(http: TestClient) -> None:
    tag = http.get("/v1/models").headers["etag"]
    assert http.get("/v1/models", headers={"Accept-Encoding": "identity"}).headers["etag"] == tag
    assert http.get("/v1/models", headers={"If-None-Match": tag}).status_code == 304


def test_style_sheets_are_compressed_and_short_answers_and_posts_are_not(http: TestClient) -> None:
    sheet = http.get("/gpus").text.partition("app.css")[0].rpartition('"')[2] + "app.css"
    assert http.get(sheet).headers["content-encoding"] == "gzip"
    assert "content-encoding" not in http.get("/healthz").headers
    ranked = http.post(
        "/v1/recommendations",
        json=QUERY | {"training": {"sequence_length": 2048, "global_batch_size": 64}},
    )
    assert ranked.status_code == 200 and len(ranked.content) > 1024
    assert "content-encoding" not in ranked.headers
    key = http.post(
        "/keys", data={"owner": "ada", "scope": "read"}, headers={"Origin": "http://127.0.0.1:8000"}
    )
    assert len(key.content) > 1024 and "content-encoding" not in key.headers  # it shows a secret


def test_events_are_not_compressed(store: SqlStore) -> None:
    search = store.create_search(query={}).id
    with (
        served(create_app(Settings(), store=store)) as url,
        httpx.stream(
            "GET", f"{url}/v1/searches/{search}/events", headers={"Accept-Encoding": "gzip"}
        ) as answer,
    ):
        assert answer.status_code == 200 and "content-encoding" not in answer.headers
        assert next(answer.iter_lines())


def test_the_first_part_of_a_streamed_page_is_readable_before_the_second_exists() -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/html")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"<p>first", "more_body": True})
        assert zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(b"".join(seen)) == b"<p>first"
        await send({"type": "http.response.body", "body": b"<p>rest"})

    async def send(message: Message) -> None:
        seen.append(message.get("body", b""))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "headers": [(b"accept-encoding", b"gzip")]}
    asyncio.run(Compression(app)(scope, receive, send))
    assert zlib.decompress(b"".join(seen), 16 + zlib.MAX_WBITS) == b"<p>first<p>rest"
