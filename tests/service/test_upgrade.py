"""An upgrade from an edition of the repository's history, and a restore, under running searches, on both databases."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.service.editions import THIS, older, quick_trainer
from tests.service.test_editions import QUERY

pytestmark = [pytest.mark.long, pytest.mark.distributed]
REPORT = {
    "query": {name: value for name, value in QUERY.items() if name not in ("parallel", "search", "trainer")},
    "parallel": {"tensor_parallel_size": 2},
    "measurement": {"status": "ok", "step_s": 0.25},
}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place: str = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    return str(request.getfixturevalue("postgres_url")) if request.param == "postgresql" else place


def test_an_earlier_editions_keys_are_honoured(url: str, tmp_path: Path) -> None:
    """A request of before the upgrade is answered as it was, though its fingerprint covers that edition's defaults."""
    quick_trainer(tmp_path / "catalog", go=tmp_path / "go")
    before, running, headers = older(tmp_path / "older"), {"database_url": url, "home": tmp_path}, {"Idempotency-Key": "one"}
    assert before.run("db", "upgrade", **running).returncode == 0
    bodies = {"searches": QUERY, "measurements": REPORT}
    answers: dict[str, set[str]] = {path: set() for path in bodies}
    for edition in (before, THIS):
        assert edition.run("db", "upgrade", **running).returncode == 0
        with edition.api(**running) as api:
            for path, body in bodies.items():
                answer = httpx.post(f"{api}/v1/{path}", json=body, headers=headers, timeout=30)
                assert answer.is_success, answer.text
                answers[path].add(answer.json()["id"])
            if edition is THIS:
                other = QUERY | {"id": "another"}
                assert httpx.post(f"{api}/v1/searches", json=other, headers=headers, timeout=30).status_code == 409
    assert [len(ids) for ids in answers.values()] == [1, 1]
