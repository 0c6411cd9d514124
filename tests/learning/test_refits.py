"""A change of what a measurement teaches is answered without a fit, and no reader takes the fit
before it for today's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hp_tool.loop.learning import Follower, StoredCalibrations, make
from hp_tool.questions.answers import answer_estimate
from hp_tool.questions.schema import parse_query
from service.client import Client
from tests.learning.machine import CONFIGURATIONS, OTHER_MODEL, report


@pytest.fixture
def client(http: Any) -> Iterator[Client]:
    with Client(server=str(http.base_url), timeout_s=60) as opened:
        yield opened


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every fit."""
    done: list[int] = []
    fit = make.fit_calibration

    def counted(**what: Any) -> Any:
        done.append(1)
        return fit(**what)

    monkeypatch.setattr(make, "fit_calibration", counted)
    return done


@pytest.fixture
def ids(client: Client) -> list[str]:
    stored = [client.report_measurement(report=report(parallel)).id for parallel in CONFIGURATIONS]
    client.calibrate()
    return stored


def known(client: Client) -> dict[str, Any]:
    answer = client.estimate(query=OTHER_MODEL)["calibrated_estimate"]
    return answer["provenance"]["calibration"] if answer else {}


def test_a_change_is_answered_without_a_fit_and_the_next_reader_sees_the_new_one(
    http: Any, client: Client, ids: list[str], fits: list[int]
) -> None:
    assert known(client)["runs"] == len(ids)
    fits.clear()
    for identity in ids[:2]:
        client.change_measurement(measurement_id=identity, state="excluded")
    origin = {"Origin": str(http.base_url).rstrip("/")}
    assert (
        http.post(f"/measurements/{ids[2]}", data={"state": "excluded"}, headers=origin).status_code
        == 303
    )
    client.delete_measurement(measurement_id=ids[3])
    assert not fits
    assert known(client)["runs"] == len(ids) - 4
    number = len(fits)
    assert number and known(client) and len(fits) == number  # several changes, one version
    newest, before = client.calibrations().items
    assert set(newest.measurement_ids) == set(ids[4:]) and set(before.measurement_ids) == set(ids)


@pytest.mark.parametrize("path", ["/v1/calibrations", "/calibration.json"])
def test_lists_are_fitted_first(http: Any, client: Client, ids: list[str], path: str) -> None:
    client.change_measurement(measurement_id=ids[0], state="excluded")
    shown = http.get(path).json()
    (newest, *_) = shown.get("items") or shown["series"]
    assert newest["version"] == 2


def test_a_reader_that_does_not_fit_says_that_one_is_due(
    http: Any, client: Client, ids: list[str]
) -> None:
    def provenance() -> Any:
        stored = StoredCalibrations(store=http.store)
        calibrated = answer_estimate(
            parse_query(OTHER_MODEL), calibrations=stored
        ).calibrated_estimate
        assert calibrated is not None
        return calibrated.provenance["calibration"]

    assert "pending" not in provenance()
    client.change_measurement(measurement_id=ids[0], state="excluded")
    assert "fitted before" in provenance()["pending"]
    (made,) = Follower(store=http.store).catch_up()  # a worker's
    assert made.record.num_measurements == len(ids) - 1
    assert "pending" not in provenance() and provenance()["version"] == made.record.version
