"""A client that hangs up in the middle of a batch is no error of the service, and harms nobody."""

from __future__ import annotations

import logging
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest


def test_a_client_that_hangs_up_in_the_middle_of_a_batch(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = urlsplit(server).port
    assert port is not None
    lines = (
        "POST /v1/batch HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Transfer-Encoding: chunked",
        "",
        "5",
        "{}\n{}",
        "",
    )
    with caplog.at_level(logging.DEBUG, logger="service"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall("\r\n".join(lines).encode())
            assert b"200 OK" in connection.recv(
                4096
            )  # the first line is answered, the second was never finished
        deadline = time.monotonic() + 10
        while not any("/v1/batch" in record.getMessage() for record in caplog.records):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR
    ] == []
    assert httpx.get(f"{server}/healthz", timeout=10).status_code == 200
