"""A service over a socket, on either database."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from hp_tool.store import open_store, schema
from service.app import create_app
from service.settings import Settings


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.components)])
def http(request, tmp_path) -> Iterator[httpx.Client]:
    url = (
        f"sqlite:///{tmp_path / 'hp.sqlite3'}"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres_url")
    )
    schema.upgrade(url)
    store = open_store(url)
    config = uvicorn.Config(
        create_app(Settings(), store=store), host="127.0.0.1", port=0, log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    with httpx.Client(
        base_url=f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", timeout=60
    ) as client:
        client.store = store
        yield client
    server.should_exit = True
    thread.join()
    store.close()
