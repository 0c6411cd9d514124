"""A service in this process over an empty store, and a small query to ask it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.ports import Store
from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings
from tests.conftest import skip_or_fail
from tests.service.processes import served
from tests.service.webhook_receiver import Receiver

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


SMALL: dict[str, Any] = {
    "id": "small",
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
    "search": {"budget_runs": 4, "run_timeout_s": 120.0, "steps": 2, "warmup_steps": 1},
}
"""A small GPT on two processes of this machine."""
CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-sandbox",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    yield opened
    opened.close()


@pytest.fixture
def settings() -> Settings:
    return Settings(max_body_bytes=20_000, poll_s=0.02)


@pytest.fixture
def http(store: Store, settings: Settings) -> Iterator[TestClient]:
    app = create_app(settings, store=store)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.fixture(scope="module")
def shared_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """One service for all tests of a module that only ask: building one takes half a second."""
    opened = open_store(f"sqlite:///{tmp_path_factory.mktemp('shared') / 'hp.sqlite3'}")
    with TestClient(
        create_app(Settings(poll_s=0.02), store=opened), base_url="http://127.0.0.1:8000"
    ) as client:
        yield client
    opened.close()


@pytest.fixture
def server(store: Store, settings: Settings) -> Iterator[str]:
    """The URL of the application behind a real socket, in a thread of this process, so that tests
    share its store.
    """
    with served(create_app(settings, store=store)) as url:
        yield url


@pytest.fixture
def query() -> dict[str, Any]:
    return copy.deepcopy(SMALL)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a file: while Playwright is open, no other test of this process
    may run an event loop.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        skip_or_fail(component="CHROMIUM", reason=f"no browser: {error}")
    if not CHROMIUM.exists():
        skip_or_fail(component="CHROMIUM", reason=f"no browser at {CHROMIUM}")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(QUIET))
        yield launched
        launched.close()


@contextmanager
def checked_page(
    browser: Browser, *, console: Collection[str] = ("error", "warning")
) -> Iterator[Page]:
    """A page that fails its test if a script threw, or the console had a message of one of these
    types.
    """
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(60_000)  # a busy machine
    problems: list[str] = []
    opened.on(
        "console",
        lambda message: problems.append(message.text) if message.type in console else None,
    )
    opened.on("pageerror", lambda error: problems.append(str(error)))
    yield opened
    context.close()
    assert problems == []


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    if "server" in request.fixturenames:
        request.getfixturevalue(
            "server"
        )  # it ends after the page, whose last requests it would cut off
    with checked_page(browser) as opened:
        yield opened


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
