"""Measurements in, calibrations out, estimates corrected: over a socket, on both databases."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

import pytest

from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.loop.learning import series
from hp_tool.loop.learning import stamp as stamps
from hp_tool.loop.learning.make import outdated_notice
from hp_tool.loop.learning.stamp import digest_of
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import resolve_training
from service.worker import Worker
from tests.learning.machine import CONFIGURATIONS, OTHER_MODEL, QUERY, report, true_step_s


@pytest.fixture
def worker(http):
    """A worker on the same database, in a thread."""

    @contextlib.contextmanager
    def running():
        stopping = threading.Event()
        thread = threading.Thread(
            target=Worker(
                store=http.store, holder="test", stopping=stopping, follow_every_s=0.1
            ).run
        )
        thread.start()
        yield
        stopping.set()
        thread.join()

    return running


def test_reported_measurements_become_a_calibration_that_estimates_take_up(http):
    assert http.post("/v1/estimates", json=OTHER_MODEL).json()["calibrated_estimate"] is None
    ids = set()
    for parallel in CONFIGURATIONS:
        answer = http.post("/v1/measurements", json=report(parallel))
        assert answer.status_code == 201, answer.text
        ids.add(answer.json()["id"])
    answer = http.post("/v1/calibrations")
    assert answer.status_code == 201, answer.text
    (made,) = answer.json()["items"]
    assert set(made["measurement_ids"]) == ids
    assert (made["version"], made["num_measurements"], made["framework"]) == (
        1,
        len(ids),
        "megatron-core",
    )
    assert made["accuracy"]["error_after"] < 0.1 < made["accuracy"]["error_before"]
    assert http.get("/v1/calibrations").json()["items"] == [made]
    assert http.get("/v1/calibrations", params={"framework": "nanotron"}).json()["items"] == []

    same = QUERY | {"parallel": {"tensor_parallel_size": 4, "recompute": "selective"}}
    after = http.post("/v1/estimates", json=same).json()["calibrated_estimate"]
    assert after["time"]["step_s"] == pytest.approx(true_step_s(same), rel=0.1)
    assert after["provenance"]["calibration"]["id"] == made["id"]
    other = http.post(
        "/v1/estimates", json=OTHER_MODEL
    ).json()  # one model's runs say less of another
    before_s, after = other["estimate"]["time"]["step_s"], other["calibrated_estimate"]
    assert before_s < after["time"]["step_s"] < true_step_s(OTHER_MODEL)
    plain = http.post("/v1/estimates", json=OTHER_MODEL, params={"calibration": False}).json()
    assert plain["calibrated_estimate"] is None
    rows = http.post("/v1/recommendations", json=QUERY, params={"top": 3}).json()["recommendations"]
    assert all(row["calibrated_estimate"] is not None for row in rows)

    assert http.post("/v1/calibrations").json()["items"] == [
        made
    ]  # nothing new to say: no new version
    assert http.post("/v1/calibrations", params={"gpu": "b200-sxm-180gb"}).json()["items"] == []


def test_what_corrects_other_predictions_is_not_used_until_it_is_fitted_again(
    http, worker, monkeypatch
):
    """As after an upgrade that moved the constants, or from a release that did not stamp its
    calibrations.
    """
    monkeypatch.setattr(series, "MAX_AGE_S", 0.0)
    for parallel in CONFIGURATIONS:
        assert http.post("/v1/measurements", json=report(parallel)).status_code == 201
    assert len(http.post("/v1/calibrations").json()["items"]) == 1
    assert outdated_notice(http.store) is None
    before = http.post("/v1/estimates", json=OTHER_MODEL).json()["calibrated_estimate"]

    record = http.store.list_calibrations().items[0]
    of = {
        name: getattr(record, name)
        for name in ("cluster_key", "framework", "model_family", "num_measurements")
    }
    stamp = {name: value for name, value in record.payload.items() if name != series.PREDICTIONS}
    http.store.save_calibration(**of, payload=stamp)
    plain = http.post("/v1/estimates", json=OTHER_MODEL | {"id": "not from the cache"}).json()
    assert plain["calibrated_estimate"] is None
    assert "version 2" in plain["estimate"]["provenance"]["calibration_unused"]
    for row in http.post("/v1/recommendations", json=QUERY, params={"top": 2}).json()[
        "recommendations"
    ]:
        assert (
            row["calibrated_estimate"] is None
            and "hp-tool calibrate" in row["estimate"]["provenance"]["calibration_unused"]
        )
    assert "1 cluster" in outdated_notice(http.store)

    with worker():
        deadline = time.monotonic() + 30
        while http.store.list_calibrations().items[0].version < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert outdated_notice(http.store) is None
    again = http.post("/v1/estimates", json=OTHER_MODEL | {"id": "once more"}).json()
    assert again["calibrated_estimate"]["time"] == before["time"]
    assert "calibration_unused" not in again["estimate"]["provenance"]


def test_the_stamp_follows_constants_and_cost_model_alone(monkeypatch):
    problem = resolve_training(parse_query(QUERY))
    stamp = digest_of(problem)
    smaller = replace(
        problem,
        cluster=problem.cluster.with_num_gpus(8),
        model=replace(problem.model, num_hidden_layers=2),
    )
    assert digest_of(smaller) == stamp
    other = replace(
        problem, cluster=replace(problem.cluster, inter_node_bandwidth_bytes_per_second=1e9)
    )
    assert digest_of(other) != stamp
    profile = efficiency_profile(gpu=problem.cluster.gpu, framework="megatron-core")
    moved = replace(
        profile, gpu=replace(profile.gpu, memory_fraction=0.99 * profile.gpu.memory_fraction)
    )
    monkeypatch.setattr(stamps, "efficiency_profile", lambda **_: moved)
    assert digest_of(problem) != stamp


def test_releases_of_a_framework_teach_each_other_and_are_told_apart_by_their_own_runs(http):
    def of(release, factor, configurations=CONFIGURATIONS):
        query = QUERY | {"training": QUERY["training"] | {"framework_version": release}}
        for parallel in configurations:
            asked = report(parallel, query=query)
            asked["measurement"]["step_s"] *= factor
            assert http.post("/v1/measurements", json=asked).status_code == 201
        return query | {"parallel": CONFIGURATIONS[0]}

    def estimate(query):
        return http.post("/v1/estimates", json=query).json()

    of("26.02", 1.2)
    new = of("26.08", 1.0, CONFIGURATIONS[:1])
    (made,) = http.post("/v1/calibrations").json()["items"]
    assert (made["framework"], made["num_measurements"]) == (
        "megatron-core",
        len(CONFIGURATIONS) + 1,
    )
    alone = estimate(new)["estimate"]["time"]["step_s"]
    truth = true_step_s(QUERY | {"parallel": CONFIGURATIONS[0]})
    for asked in (
        new,
        QUERY | {"parallel": CONFIGURATIONS[0]},
    ):  # one run of its own shadows none of the others
        learnt = estimate(asked)["calibrated_estimate"]
        assert learnt["provenance"]["calibration"]["measurements"] == len(CONFIGURATIONS) + 1
        assert abs(learnt["time"]["step_s"] / truth - 1) < abs(alone / truth - 1)


def test_a_worker_learns_what_trainings_report_without_being_asked(http, worker):
    for parallel in CONFIGURATIONS:
        assert http.post("/v1/measurements", json=report(parallel)).status_code == 201
    with worker():
        deadline = time.monotonic() + 20
        while not (items := http.get("/v1/calibrations").json()["items"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert items[0]["num_measurements"] == len(CONFIGURATIONS)
    with worker():
        time.sleep(0.5)  # nothing new was said
    assert len(http.get("/v1/calibrations").json()["items"]) == 1
