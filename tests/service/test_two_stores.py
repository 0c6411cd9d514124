"""Two applications of one process, each with its own store: what one has learnt says nothing to the
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.store import knowledge, open_store
from service.app import create_app
from service.settings import Settings
from tests.service.test_calibration_pages import SETTINGS, metrics, report

RATIOS = (1.2, 1.6)
"""How much longer the runs that each store knows took than predicted."""


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TestClient]]:
    """A service for each of RATIOS, whose calibrations have the same ids."""
    with ExitStack() as stack:
        services = []
        for ratio in RATIOS:
            store = open_store(f"sqlite:///{tmp_path / f'{ratio}.sqlite3'}")
            stack.callback(store.close)
            app = create_app(Settings(poll_s=0.02), store=store)
            http = stack.enter_context(TestClient(app, base_url="http://127.0.0.1:8000"))
            for stages, micro_batch in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2)):
                report(
                    http, slower=ratio, pipeline_parallel_size=stages, micro_batch_size=micro_batch
                )
            with monkeypatch.context() as patched:
                patched.setattr(
                    knowledge, "new_id", map("{:016x}".format, itertools.count(1)).__next__
                )
                assert http.post("/calibration", follow_redirects=False).status_code == 303
            services.append(http)
        yield services


def heading_and_list(http: TestClient) -> tuple[dict[str, Any], float, float]:
    """The calibration that the page names, and the step time of its heading and of the chosen row
    of its list.
    """
    page = http.get("/explorer.json", params=SETTINGS).json()
    chosen = next(row for row in page["rows"] if row["chosen"])
    configuration = http.get(page["configuration_href"].replace("?", ".json?")).json()["view"]
    assert metrics(configuration)["Step time"]["value"] == pytest.approx(
        metrics(page["view"])["Step time"]["value"]
    )
    calibrations = http.get("/v1/calibrations").json()["items"]
    return calibrations, metrics(page["view"])["Step time"]["value"], chosen["step_s"]


def test_calibrations_of_one_id_in_two_stores_are_two(measured: list[TestClient]) -> None:
    pages = [heading_and_list(http) for http in (*measured, *measured)]
    ids = {tuple(each["id"] for each in calibrations) for calibrations, _, _ in pages}
    assert len(ids) == 1, "the ids are the same"
    for _, heading, listed in pages:
        assert listed == pytest.approx(heading)
    (_, fast, _), (_, slow, _), *again = pages
    assert slow / fast > 1.1
    assert [heading for _, heading, _ in again] == pytest.approx([fast, slow])
