"""Measurements over a socket, on both databases: lists, what is held, what is taken back, and who
may.
"""

from __future__ import annotations

import json

import pytest

from hp_tool.domain.access import Scope
from hp_tool.errors import InputError
from service import keys
from service.client import Client
from service.dashboard import formats
from tests.learning.machine import CONFIGURATIONS, OTHER_MODEL, QUERY, lines, report

SLOW = 30


@pytest.fixture
def client(http):
    with Client(server=str(http.base_url), timeout_s=60) as opened:
        yield opened


def test_a_list_is_stored_entry_by_entry(http, client):
    told = [report(parallel) for parallel in CONFIGURATIONS]
    told[1]["measurement"] = {"step_s": 0.0}
    told[2]["parallel"] = {"tensor_parallel_size": 3}
    answer = client.report_measurements(reports=told)
    assert len(answer.stored) == len(told) - 2 and {each.state for each in answer.stored} == {
        "accepted"
    }
    found = [(each.line, each.field, each.code) for each in answer.refused]
    assert found == [
        (2, "measurement.step_s", "invalid_value"),
        (3, "parallel", "heads_not_divisible"),
    ]
    nothing = http.post("/v1/measurements", json=told[1:2])
    assert (nothing.status_code, nothing.json()["stored"]) == (200, [])
    for body in ([], [1, "two"], [told[0]] * 1001):
        assert http.post("/v1/measurements", json=body).status_code in (200, 422)

    headers = {"Idempotency-Key": "again"}
    first, again = (
        http.post("/v1/measurements", json=told[3:], headers=headers).json()["stored"]
        for _ in range(2)
    )
    assert first == again
    streamed = http.post(
        "/v1/measurements/bulk", content=lines().encode() + b"broken\n"
    ).text.splitlines()
    assert [json.loads(line)["line"] for line in streamed] == list(
        range(1, len(CONFIGURATIONS) + 2)
    )
    assert [json.loads(line)["status"] for line in streamed] == ["ok"] * len(CONFIGURATIONS) + [
        "error"
    ]


def test_what_is_far_off_waits_and_can_be_accepted(http, client):
    told = report(CONFIGURATIONS[0])
    truth = told["measurement"]["step_s"]
    told["measurement"] = {"step_s": 4 * truth}
    odd = client.report_measurement(report=told)
    assert odd.state == "accepted" and "times off the predicted" in odd.warnings[0]
    told["measurement"] = {"step_s": SLOW * truth}
    held = client.report_measurement(report=told)
    assert held.state == "held" and "until it is accepted" in held.warnings[0]
    (made,) = client.calibrate().items
    assert made.measurement_ids == [odd.id]
    assert [each.id for each in client.measurements(state="held").items] == [held.id]

    assert client.change_measurement(measurement_id=held.id, state="accepted").state == "accepted"
    newest, before = client.calibrations().items
    assert (newest.version, set(newest.measurement_ids)) == (2, {odd.id, held.id})
    assert (before.version, before.measurement_ids) == (1, [odd.id])  # it stays readable
    assert client.delete_measurement(measurement_id=held.id).state == "deleted"
    assert client.calibrations().items[0].measurement_ids == [odd.id]
    assert [each.id for each in client.measurements().items] == [odd.id]
    assert client.measurement(measurement_id=held.id).state == "deleted"
    with pytest.raises(InputError):
        client.change_measurement(measurement_id=odd.id, state="held")


def test_an_estimate_follows_at_once_and_names_what_corrected_it(http, client):
    ids = [client.report_measurement(report=report(parallel)).id for parallel in CONFIGURATIONS]
    waiting = client.estimate(query=OTHER_MODEL)["estimate"]["provenance"]["calibration_unused"]
    assert "not fitted yet" in waiting
    client.calibrate()
    answer = client.estimate(query=OTHER_MODEL)
    known = answer["calibrated_estimate"]["provenance"]["calibration"]
    assert (known["version"], known["runs"], known["models"]) == (
        1,
        len(ids),
        {"llama-3-8b": len(ids)},
    )
    ratio = answer["calibrated_estimate"]["time"]["step_s"] / answer["estimate"]["time"]["step_s"]
    assert known["correction"] == pytest.approx(ratio)
    (made,) = client.calibrations().items
    assert known["accuracy"] == made.accuracy and made.models == known["models"]

    for identity in ids:
        client.delete_measurement(measurement_id=identity)
    assert client.estimate(query=OTHER_MODEL)["calibrated_estimate"] is None
    client.change_measurement(measurement_id=ids[0], state="accepted")
    assert (
        client.estimate(query=OTHER_MODEL)["calibrated_estimate"]["provenance"]["calibration"][
            "runs"
        ]
        == 1
    )


def test_pages_and_the_api_show_the_same_errors_of_runs_that_a_fit_did_not_see(http, client):
    for parallel in CONFIGURATIONS:
        client.report_measurement(report=report(parallel))
    (made,) = client.calibrate().items
    (row,) = http.get("/calibration.json").json()["series"]
    assert (row["error_before"], row["error_after"]) == (
        made.accuracy["error_before"],
        made.accuracy["error_after"],
    )
    page = http.get(row["href"].replace("/series?", "/series.json?")).json()
    errors = sorted(abs(run["error_after"]) for run in page["lessons"])
    assert (errors[2] + errors[3]) / 2 == pytest.approx(made.accuracy["error_after"])
    query = {"query": json.dumps(QUERY | {"parallel": CONFIGURATIONS[0]})}
    assert http.get("/configurations", params=query).status_code == 200


def test_the_page_changes_what_teaches(http, client):
    told = report(CONFIGURATIONS[0])
    told["measurement"]["step_s"] *= SLOW
    held = client.report_measurement(report=told).id
    assert "held" in http.get("/calibration").text
    (row,) = http.get("/measurements.json", params={"state": "held"}).json()["rows"]
    assert [action["state"] for action in row["actions"]] == ["accepted", "excluded"] and row[
        "warnings"
    ]
    origin = {"Origin": str(http.base_url).rstrip("/")}
    answer = http.post(row["href"], data={"state": "accepted"}, headers=origin)
    assert answer.status_code == 303
    assert client.measurement(measurement_id=held).state == "accepted"
    assert client.calibrations().items[0].measurement_ids == [held]
    assert http.post(row["href"], data={"state": "odd"}, headers=origin).status_code == 422


def test_a_measurement_is_its_owners_and_the_administrators(http):
    headers = {}
    for owner, scope in (("ada", Scope.SUBMIT), ("bob", Scope.SUBMIT), ("root", Scope.ADMIN)):
        _, token = keys.issue(store=http.store, owner=owner, scope=scope)
        headers[owner] = {"Authorization": f"Bearer {token}"}
    identity = http.post(
        "/v1/measurements", json=report(CONFIGURATIONS[0]), headers=headers["ada"]
    ).json()["id"]
    path = f"/v1/measurements/{identity}"
    for method, body in (("GET", None), ("PATCH", {"state": "excluded"}), ("DELETE", None)):
        assert http.request(method, path, json=body, headers=headers["bob"]).status_code == 404
    assert (
        http.patch(path, json={"state": "excluded"}, headers=headers["ada"]).json()["state"]
        == "excluded"
    )
    assert (
        http.patch(path, json={"state": "accepted"}, headers=headers["root"]).json()["state"]
        == "accepted"
    )


def test_what_a_fit_holds_back_is_told_everywhere(http, client):
    for parallel in CONFIGURATIONS:
        client.report_measurement(report=report(parallel))
    client.calibrate()
    record = http.store.list_calibrations().items[0]
    fit = record.payload["step_time"] | {"applied": 0.75, "applied_elsewhere": 0.25}
    series = {
        name: getattr(record, name)
        for name in ("cluster_key", "framework", "model_family", "num_measurements")
    }
    told = {"applied": 0.75, "applied_elsewhere": 0.25}
    http.store.save_calibration(**series, payload=record.payload | {"step_time": fit})
    newest = client.calibrations().items[0]
    assert told.items() <= newest.summary.items()
    (row,) = http.get("/calibration.json").json()["series"]
    page = http.get(row["href"].replace("/series?", "/series.json?")).json()
    shares = {
        factor["name"]: factor["text"]
        for factor in page["factors"]
        if factor["name"].startswith("share applied")
    }
    assert shares == {
        "share applied to models that ran": formats.share(0.75),
        "share applied to other models": formats.share(0.25),
    }


def test_reports_of_one_owner_do_not_move_anothers_answers(http):
    def client_of(owner, scope=Scope.SUBMIT):
        _, token = keys.issue(store=http.store, owner=owner, scope=scope)
        return Client(server=str(http.base_url), api_key=token, timeout_s=60)

    def correction(asker):
        calibrated = asker.estimate(query=OTHER_MODEL)["calibrated_estimate"]
        return calibrated and calibrated["provenance"]["calibration"]["correction"]

    told = report(CONFIGURATIONS[0])
    slow = report(CONFIGURATIONS[0], step_s=5.0 * told["measurement"]["step_s"])
    with client_of("ada") as ada, client_of("bob") as bob, client_of("root", Scope.ADMIN) as root:
        root.report_measurement(report=told)
        root.calibrate()
        before = correction(bob)
        assert before is not None and correction(ada) == before
        measurement = ada.report_measurement(report=slow)
        assert not measurement.trusted
        ada.calibrate()
        assert correction(ada) != before == correction(bob)
        assert [each.owner for each in ada.calibrations().items] == ["ada", ""]
        assert [each.owner for each in bob.calibrations().items] == [""]
        root.change_measurement(measurement_id=measurement.id, state="excluded")
        assert correction(ada) == before
        assert not ada.change_measurement(measurement_id=measurement.id, state="accepted").trusted
        assert correction(bob) == before
        assert root.change_measurement(measurement_id=measurement.id, state="accepted").trusted
        assert correction(bob) == correction(ada) != before


def test_a_throughput_that_no_training_reaches_is_refused(http):
    told = report(CONFIGURATIONS[0])
    told["measurement"] = {"tokens_per_second_per_gpu": 1e9}
    answer = http.post("/v1/measurements", json=told)
    assert (answer.status_code, answer.json()["field"]) == (422, "measurement.step_s")
