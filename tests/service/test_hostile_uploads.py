"""Uploads that exhaust memory, never end or are abandoned: they end in their own process and delay
nobody else.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from hp_tool.domain.access import Scope
from hp_tool.store import open_store
from service import keys
from service.http import asgi_body
from tests.service.hostile import HOSTILE, many_ranks_log
from tests.service.processes import api_process, wait_for

pytestmark = pytest.mark.components

LEVEL_BYTES = 150 * 2**20
"""How much the service process may grow while it refuses files: modules that load at the first
upload, and its caches.
"""
MEMORY_MIB = 512


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    return {name: make(folder / name) for name, make in HOSTILE.items()}


@pytest.fixture
def service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, psutil.Process]]:
    """A service whose uploads may take a minute."""
    monkeypatch.setenv("HP_MAX_UPLOAD_MEMORY_MIB", str(MEMORY_MIB))
    with api_process(database_url=f"sqlite:///{tmp_path / 'hp.sqlite3'}", home=tmp_path) as running:
        yield running


def send(url: str, path: Path, *, headers: dict[str, str] | None = None) -> httpx.Response:
    with path.open("rb") as file:
        return httpx.post(
            f"{url}/v1/explanations",
            files=[("trace", (path.name, file))],
            headers=headers,
            timeout=300,
        )


@contextmanager
def largest_memory(process: psutil.Process) -> Iterator[list[int]]:
    """Sample the resident memory of a process and of the largest of its children."""
    largest, ending = [0, 0], threading.Event()

    def sample() -> None:
        while not ending.wait(0.02):
            largest[0] = max(largest[0], process.memory_info().rss)
            for child in process.children(recursive=True):
                try:
                    largest[1] = max(largest[1], child.memory_info().rss)
                except psutil.Error:
                    continue

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield largest
    finally:
        ending.set()
        thread.join()


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])
def test_memory_of_the_service_stays_level_under_hostile_files(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setenv("HP_MAX_UPLOAD_MEMORY_MIB", str(MEMORY_MIB))
    monkeypatch.setenv("HP_MAX_CPU_SECONDS_PER_UPLOAD", "2")
    running = api_process(database_url=f"sqlite:///{tmp_path / 'hp.sqlite3'}", home=tmp_path)
    with running as (url, process), largest_memory(process) as largest:
        before = process.memory_info().rss
        for _ in range(rounds):
            for path in files.values():
                answer = send(url, path)
                assert answer.status_code in (200, 422), answer.text
                if answer.status_code == 422:
                    assert answer.json()["code"] in (
                        "request_too_costly",
                        "zip_bomb",
                        "too_large",
                        "no_trace",
                    ), answer.text
        honest = send(url, many_ranks_log(tmp_path / "train.log"))
    assert honest.status_code == 200, honest.text
    assert "Rank 5 takes" in honest.json()["findings"][0]["text"]
    assert largest[0] - before < LEVEL_BYTES
    assert largest[1] < (MEMORY_MIB + 200) * 2**20


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _children(process: psutil.Process) -> int:
    return len(
        [
            child
            for child in process.children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE
        ]
    )


def _begin_upload(url: str, path: Path) -> socket.socket:
    """Send a whole upload and leave its connection open."""
    parts = urlsplit(url)
    content = path.read_bytes()
    head = (
        f'--b\r\nContent-Disposition: form-data; name="trace"; filename="{path.name}"\r\n\r\n'
    ).encode()
    body = head + content + b"\r\n--b--\r\n"
    lines = (
        "POST /v1/explanations HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: multipart/form-data; boundary=b",
    )
    request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
    assert parts.port is not None
    connection = socket.create_connection(("127.0.0.1", parts.port), timeout=30)
    connection.sendall(request)
    return connection


def test_an_abandoned_upload_ends_at_once(
    service: tuple[str, psutil.Process], files: dict[str, Path]
) -> None:
    url, process = service
    connection = _begin_upload(url, files["ranks.json.gz"])
    wait_for(lambda: _children(process))
    time.sleep(1.0)
    connection.close()
    wait_for(lambda: not _children(process), timeout_s=3)


def test_sigterm_ends_a_service_that_reads_an_upload(
    service: tuple[str, psutil.Process], files: dict[str, Path]
) -> None:
    url, process = service
    with _begin_upload(url, files["ranks.json.gz"]):
        wait_for(lambda: _children(process))
        child = process.children(recursive=True)[0]
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=10)
        wait_for(lambda: _has_ended(child), timeout_s=5)


def test_a_killed_service_leaves_no_reader(
    service: tuple[str, psutil.Process], files: dict[str, Path]
) -> None:
    url, process = service
    with _begin_upload(url, files["ranks.json.gz"]):
        wait_for(lambda: _children(process))
        child = process.children(recursive=True)[0]
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: _has_ended(child), timeout_s=5)


def test_an_upload_delays_no_other_key(tmp_path: Path, files: dict[str, Path]) -> None:
    database_url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    store = open_store(database_url)
    first, second = (
        {"Authorization": f"Bearer {keys.issue(store=store, owner=owner, scope=Scope.READ)[1]}"}
        for owner in ("a", "b")
    )
    store.close()
    small = tmp_path / "small.json"
    small.write_text(
        json.dumps([{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 9, "tid": 7}])
    )

    def occupy() -> None:
        with suppress(httpx.HTTPError):  # the service ends first
            send(url, files["ranks.json.gz"], headers=first)

    with api_process(database_url=database_url, home=tmp_path) as (url, process):
        threads = [threading.Thread(target=occupy) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: _children(process))
        started = time.monotonic()
        answer = send(url, small, headers=second)
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - started < 10.0
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("path", ["/v1/explanations", "/explain"])
@pytest.mark.parametrize("drips", [False, True])
def test_an_upload_that_stays_silent_or_drips_is_ended(
    server: str, monkeypatch: pytest.MonkeyPatch, path: str, drips: bool
) -> None:
    monkeypatch.setattr(asgi_body, "MAX_PAUSE_S", 60.0 if drips else 0.4)
    monkeypatch.setattr(asgi_body, "MAX_BODY_S", 0.4 if drips else 60.0)
    parts = urlsplit(server)
    head = '--b\r\nContent-Disposition: form-data; name="trace"; filename="a.json"\r\n\r\n'
    lines = (
        f"POST {path} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: multipart/form-data; boundary=b",
    )
    request = "\r\n".join([*lines, "Content-Length: 100000", "", head])
    assert parts.port is not None
    with socket.create_connection(("127.0.0.1", parts.port), timeout=10) as connection:
        connection.sendall(request.encode())
        for _ in range(30 if drips else 0):
            with suppress(OSError):
                connection.send(b" ")
            time.sleep(0.05)
        assert b" 408 " in connection.recv(4096).splitlines()[0]
