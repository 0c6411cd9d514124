"""The service as processes, the way it is deployed: `hp-tool serve` and `hp-tool worker` over one
database; or in a thread.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import uvicorn
from fastapi import FastAPI

from service.app import server_options

HANG_S = 300.0
"""What has not happened by then never will, on a busy machine either."""


def hp_tool(*arguments: str) -> list[str]:
    """argv of `hp-tool` with the interpreter that runs the tests."""
    return [sys.executable, "-c", "from hp_tool.cli.main import main; main()", *arguments]


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def process(*arguments: str, database_url: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running `hp-tool`; told to end with SIGTERM, and expected to obey."""
    environment = {**os.environ, "HP_DATABASE_URL": database_url, "HP_RUNS_DIR": str(home / "runs")}
    environment.pop("HP_API_KEY", None)
    with (home / f"{arguments[0]}-{time.monotonic_ns()}.log").open("wb") as log:
        running = subprocess.Popen(hp_tool(*arguments), env=environment, stderr=log, stdout=log)
        try:
            yield running
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGTERM)
                running.wait(timeout=HANG_S)


@contextmanager
def api(*, database_url: str, home: Path, port: int | None = None) -> Iterator[str]:
    """A ready API; its URL."""
    with api_process(database_url=database_url, home=home, port=port) as (url, _):
        yield url


@contextmanager
def api_process(
    *, database_url: str, home: Path, port: int | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """A ready API: its URL and its process."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    with process("serve", "--port", str(port), database_url=database_url, home=home) as serving:
        wait_for(lambda: serving.poll() is not None or _ready(url))
        assert serving.poll() is None, "the API ended; see its log"
        yield url, psutil.Process(serving.pid)


@contextmanager
def served(app: FastAPI, *, port: int = 0) -> Iterator[str]:
    """An application behind a real socket, in a thread of this process, as `serve` runs it; its
    URL. In the end streams are cut off.
    """
    options = server_options(app.state.settings) | {"port": port, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, log_level="warning", **options)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Callable[[], object], *, timeout_s: float = HANG_S) -> None:
    """Return once the condition holds; AssertionError after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.1)


def of_home(home: Path) -> list[psutil.Process]:
    """Every living process whose arguments or environment name this home: API, workers, and jobs,
    whoever their parent is.
    """
    found = []
    for candidate in psutil.process_iter():
        try:
            words = [*candidate.cmdline(), *candidate.environ().values()]
            if candidate.pid != os.getpid() and any(str(home) in word for word in words):
                found.append(candidate)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def ranks(home: Path) -> int:
    """How many training processes of this home's jobs are at work."""
    found = 0
    for candidate in of_home(home):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found += "LOCAL_RANK" in candidate.environ()
    return found
