"""A body that grows past the limit without having announced it: 413 on every route, over a socket,
before anything is done.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from service.app import create_app
from service.http.routes import STREAMED, UPLOADS
from service.settings import Settings
from tests.service.processes import served
from tests.service.routes import every_route

LIMIT = 4_096


def chunks() -> Iterator[bytes]:
    """A body that is well-formed, and a little too long."""
    yield b"{"
    for _ in range(4):
        yield b" " * (LIMIT // 4)
    yield b"}"


def test_a_chunked_body_past_the_limit(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    database = tmp_path_factory.mktemp("chunked") / "hp.sqlite3"
    settings = Settings(
        database_url=f"sqlite:///{database}", max_body_bytes=LIMIT, max_batch_bytes=LIMIT
    )
    app = create_app(settings)
    routes = [route for route in every_route(app) if route.method != "GET"]
    values = dict.fromkeys(
        ("search_id", "key_id", "name", "run_id", "measurement_id", "watch_id"), "x"
    )
    with (
        served(app) as url,
        httpx.Client(base_url=url, timeout=30) as http,
        caplog.at_level(logging.ERROR),
    ):
        for route in routes:
            answer = http.request(route.method, route.at(**values), content=chunks())
            if route.pattern in UPLOADS:  # its body is a form
                assert answer.status_code == 422
                parts = iter(
                    [b"--x\r\nContent-Disposition: form-data; name=query\r\n\r\n", *chunks()]
                )
                form = {"Content-Type": "multipart/form-data; boundary=x"}
                answer = http.request(route.method, route.pattern, content=parts, headers=form)
                assert answer.status_code == 413
                said = answer.json()
            elif (
                route.pattern in STREAMED
            ):  # its status is sent before its end is known: the last line tells
                assert answer.status_code == 200
                said = json.loads(answer.text.splitlines()[-1])["error"]
            else:
                assert answer.status_code == 413, (route, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
                said = answer.json()
            assert said["code"] == "payload_too_large", route
        nowhere = http.post("/v1/nowhere", content=chunks())
        whole = http.post("/v1/estimates", content=iter([b'{"kind": ', b'"training"}']))
    assert (nowhere.status_code, whole.status_code, len(routes) > 25) == (413, 422, True)
    assert whole.json()["code"] == "missing_field"  # a chunked body within the limit is read
    assert [record.getMessage() for record in caplog.records] == []
