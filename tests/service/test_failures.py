"""A search whose runs folder, launcher or workers fail: asked over a socket, with real worker
processes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.service.faults.campaign import QUERY
from tests.service.faults.processes import Service, preload
from tests.service.processes import HANG_S, wait_for

pytestmark = pytest.mark.components
LEASE_S = 0.5
NARROW = {
    "gpu": "cpu",
    "gpus_per_node": 2,
    "num_gpus": 2,
    "inter_node_bandwidth_bytes_per_second": 1e9,
    "fabric": "ethernet",
    "runs": {"launcher": "local", "max_concurrent_runs": 1},
}
"""A cluster that takes one run at a time."""
Fix = Callable[[], object]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    preload()
    clusters = tmp_path / "catalog" / "clusters"
    for folder in (clusters, tmp_path / "faults"):
        folder.mkdir(parents=True)
    (clusters / "narrow.yaml").write_text(yaml.safe_dump(NARROW))
    made = Service(
        database_url=f"sqlite:///{tmp_path / 'hp.sqlite3'}", home=tmp_path, lease_s=LEASE_S
    )
    try:
        made.start_api()
        yield made
    finally:
        made.stop()


def submit(service: Service, **changed: Any) -> str:
    answer = httpx.post(
        f"{service.url}/v1/searches",
        json=QUERY | {"search": QUERY["search"] | {"budget_runs": 1}} | changed,
        timeout=HANG_S,
    )
    assert answer.status_code == httpx.codes.ACCEPTED, answer.text
    return str(answer.json()["id"])


def search(service: Service, search_id: str) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(
        f"{service.url}/v1/searches/{search_id}", timeout=HANG_S
    ).json()
    return body


def steer(service: Service, search_id: str, action: str) -> tuple[int, str | None]:
    answer = httpx.post(f"{service.url}/v1/searches/{search_id}/{action}", timeout=HANG_S)
    return answer.status_code, answer.json().get("state")


def wait_for_state(service: Service, search_id: str, state: str) -> None:
    wait_for(lambda: search(service, search_id)["state"] == state)


def run_states(service: Service, search_id: str) -> list[str]:
    return [
        trial["state"]
        for trial in httpx.get(
            f"{service.url}/v1/searches/{search_id}/trials", timeout=HANG_S
        ).json()["trials"]
    ]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("this user may not mount file systems")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full(folder: Path) -> Iterator[Fix]:
    filler = folder / "filler"
    with small_disk(folder):
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(2**20))
        yield filler.unlink


@contextmanager
def read_only(folder: Path) -> Iterator[Fix]:
    with small_disk(folder):
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield lambda: subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


@contextmanager
def no_folder(folder: Path) -> Iterator[Fix]:
    folder.touch()
    yield folder.unlink


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (full, "No space left"),
        pytest.param(read_only, "Read-only file system", marks=pytest.mark.long),
        pytest.param(no_folder, "File exists", marks=pytest.mark.long),
    ],
)
def test_a_search_waits_until_the_folder_of_its_runs_is_mended(
    service: Service, trouble: Callable[[Path], AbstractContextManager[Fix]], reason: str
) -> None:
    with trouble(service.home / "runs") as fix:
        asked = submit(service)
        service.start_worker()
        wait_for(lambda: search(service, asked)["state"] == "failed" or told(service, asked))
        assert (search(service, asked)["state"], reason in told(service, asked)) == (
            "running",
            True,
        )
        fix()
        wait_for_state(service, asked, "succeeded")
        assert "waiting_for" not in search(service, asked)["progress"]
        assert run_states(service, asked) == ["finished"]


def told(service: Service, search_id: str) -> str:
    """What the search says it waits for."""
    return str(search(service, search_id)["progress"].get("waiting_for", ""))


def test_a_search_that_waits_for_its_folder_can_be_cancelled(service: Service) -> None:
    with no_folder(service.home / "runs"):
        asked = submit(service)
        service.start_worker()
        wait_for(lambda: told(service, asked))
        steer(service, asked, "cancel")
        wait_for_state(service, asked, "cancelled")
        assert run_states(service, asked) == ["abandoned"]


@pytest.mark.parametrize(
    ("action", "end"),
    [pytest.param("cancel", "cancelled", marks=pytest.mark.long), ("resume", "succeeded")],
)
def test_a_failed_search_holds_nothing_and_can_be_steered(
    service: Service, action: str, end: str
) -> None:
    bug = service.home / "faults" / "bug"
    bug.touch()
    failed = submit(service, cluster="narrow")
    service.start_worker()
    wait_for_state(service, failed, "failed")
    assert run_states(service, failed) == ["abandoned"]
    bug.unlink()
    wait_for_state(service, submit(service, cluster="narrow"), "succeeded")
    assert steer(service, failed, action)[0] == httpx.codes.OK
    wait_for_state(service, failed, end)


@pytest.mark.long
def test_a_search_that_kills_its_workers_is_given_up_and_can_be_resumed(service: Service) -> None:
    poison = service.home / "faults" / "poison"
    poison.touch()
    asked = submit(service, cluster="narrow")
    claims = 0
    while search(service, asked)["state"] != "failed":
        assert claims < 10, "it goes on killing workers"
        service.ensure_workers(1)
        claims += 1
        worker = service.workers[0]
        wait_for(
            lambda: not worker.is_alive() or search(service, asked)["state"] == "failed",  # noqa: B023
            timeout_s=60,
        )
    error = search(service, asked)["error"]
    assert error["code"] == "worker_lost_repeatedly"
    assert "5 workers" in error["message"]
    poison.unlink()
    service.ensure_workers(1)
    wait_for_state(service, submit(service, cluster="narrow"), "succeeded")
    assert steer(service, asked, "resume") == (httpx.codes.OK, "queued")
    wait_for_state(service, asked, "succeeded")
