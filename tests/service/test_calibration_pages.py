"""What measurements taught, as pages show it."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.ports import Store
from service.dashboard import ask

H100: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 512},
}
SETTINGS = {
    "model": "llama-3-70b",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": 64,
    "training.sequence_length": 8192,
    "training.global_batch_size": 512,
}


def at(tensor: int, pipeline: int) -> dict[str, int]:
    """The address's values of a shown layout."""
    return {
        "at.parallel.tensor_parallel_size": tensor,
        "at.parallel.pipeline_parallel_size": pipeline,
    }


EVIL = "<img src=x onerror=alert(1)>"


def report(http: TestClient, *, slower: float, **parallel: int) -> float:
    """A training that took so many times what was predicted; the prediction."""
    query = H100 | {"parallel": {"tensor_parallel_size": 8, **parallel}}
    step_s: float = http.post("/v1/estimates?calibration=false", json=query).json()["estimate"][
        "time"
    ]["step_s"]
    body = {
        "query": H100,
        "parallel": query["parallel"],
        "measurement": {"status": "ok", "step_s": slower * step_s},
    }
    answer = http.post("/v1/measurements", json=body)
    assert answer.status_code == 201, answer.text
    return step_s


@pytest.fixture
def learnt(http: TestClient) -> TestClient:
    """Six runs, 30% slower than predicted but for one that is four times as slow."""
    for stages, micro_batch in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2)):
        report(http, slower=1.3, pipeline_parallel_size=stages, micro_batch_size=micro_batch)
    report(http, slower=4.0, pipeline_parallel_size=8, micro_batch_size=2)
    assert http.post("/calibration", follow_redirects=False).status_code == 303
    return http


def test_before_anything_was_learnt(http: TestClient) -> None:
    assert "No calibrations yet" in http.get("/calibration").text
    assert "No matching measurements" in http.get("/measurements").text
    assert http.get(
        "/calibration/series", params={"cluster_key": "x", "framework": "y"}
    ).status_code in (404, 422)


def test_a_series_from_the_list_to_its_runs(learnt: TestClient) -> None:
    (row,) = learnt.get("/calibration.json").json()["series"]
    assert (row["measurements"], row["family"], row["version"]) == (6, "dense models", 1)
    assert row["error_before"] == pytest.approx(1 - 1 / 1.3, abs=1e-6)
    assert row["error_after"] < row["error_before"]
    assert row["href"] in learnt.get("/calibration").text.replace("&amp;", "&")
    series = learnt.get(row["href"].replace("/series?", "/series.json?")).json()
    assert learnt.get(row["href"]).status_code == 200
    runs = series["lessons"]
    assert len(runs) == 6 and all(run["taught"] for run in runs)
    for run in runs:
        assert run["error_before"] == pytest.approx(run["before_s"] / run["measured_s"] - 1)
    assert [run["measured_s"] / run["before_s"] > 2 for run in runs] == [
        run["outlier"] for run in runs
    ]
    assert series["outliers"] == 1
    usual = [run for run in runs if run["error_before"] > -0.5]
    assert all(abs(run["error_after"]) < abs(run["error_before"]) for run in usual)
    agreement = series["figures"]["agreement"]["traces"]
    assert sorted(agreement[2]["y"]) == pytest.approx(sorted(run["after_s"] for run in runs))
    (odd,) = (run for run in runs if run["outlier"])
    assert (agreement[3]["x"], agreement[3]["y"]) == ([odd["measured_s"]], [odd["after_s"]])


def test_measurements_are_filtered(learnt: TestClient) -> None:
    assert len(learnt.get("/measurements.json").json()["rows"]) == 6
    assert learnt.get("/measurements.json", params={"status": "oom"}).json()["rows"] == []
    assert learnt.get("/measurements.json", params={"model": "llama-3-8b"}).json()["rows"] == []
    assert learnt.get("/measurements", params={"status": "odd"}).status_code == 422
    found = learnt.get(
        "/measurements.json", params={"gpu": "h100-sxm-80gb", "status": "ok"}
    ).json()["rows"]
    assert len(found) == 6
    assert learnt.get(found[0]["configuration_href"]).status_code == 200


def test_what_waits_for_a_decision_comes_first(http: TestClient) -> None:
    query = H100 | {"parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4}}
    report(http, slower=25.0, pipeline_parallel_size=4)
    report(http, slower=1.3, pipeline_parallel_size=2)
    body = {"query": H100, "parallel": query["parallel"], "measurement": {"status": "oom"}}
    assert http.post("/v1/measurements", json=body).status_code == 201
    rows = http.get("/measurements.json").json()["rows"]
    assert [row["state"] for row in rows] == ["held", "accepted", "accepted"]
    assert [row["teaches"] for row in rows[1:]] == ["out of memory", "time"]
    assert (
        rows[0]["measured_s"] == pytest.approx(25.0 * rows[0]["predicted_s"])
        and "25 times the predicted" in rows[0]["notes"][0]
    )
    (cluster,) = http.get("/calibration.json").json()["clusters"]
    assert (cluster["measurements"], cluster["num_held"]) == (2, 1) and "3, 1 held" in http.get(
        "/calibration"
    ).text
    page = http.get("/measurements").text
    assert "1 measurement waiting for review" in page and "25 times the predicted" in page
    assert len(http.get("/measurements.json", params={"state": "accepted"}).json()["rows"]) == 2


def test_a_users_words_are_text(http: TestClient, store: Store) -> None:
    from hp_tool.domain.measurement import Measurement
    from hp_tool.domain.measurement_records import NewMeasurement
    from hp_tool.domain.parallel import ParallelConfig

    store.add_measurement(
        measurement=NewMeasurement(
            source="file",
            cluster_key=EVIL,
            gpu=EVIL,
            framework=EVIL,
            model=EVIL,
            query={},
            parallel=ParallelConfig(),
            measurement=Measurement(status="crashed", cause=EVIL),
        )
    )
    for page in ("/measurements", "/calibration"):
        assert EVIL not in http.get(page).text and "&lt;img" in http.get(page).text
    assert "Not used: its query was not stored." in http.get("/measurements").text


def test_all_pages_of_a_measured_cluster_say_one_number(learnt: TestClient) -> None:
    """The explorer's heading, its list, its chart of switches and its fixes, a configuration, and
    two compared.
    """
    page = learnt.get("/explorer.json", params=SETTINGS).json()
    href = page["configuration_href"]
    one = learnt.get(href.replace("?", ".json?")).json()
    chosen = next(row for row in page["rows"] if row["chosen"])
    step_s = chosen["step_s"]
    plain = next(row for row in page["rows"] if row["parallel"]["recompute"] == "none")
    opened = learnt.get(plain["settings_href"].replace("?", ".json?", 1)).json()
    (switch,) = (
        bar for bar in opened["effect_time"]["bars"] if bar["label"] == "Sequence parallel"
    )
    assert [metrics(opened["view"])["Step time"]["value"], switch["total"]] == pytest.approx(
        [plain["step_s"]] * 2
    )
    fastest = learnt.get(one["compare_href"].replace("?", ".json?")).json()
    compared = next(row for row in fastest["rows"] if row["name"] == "Step time")
    seconds = [
        metrics(page["view"])["Step time"]["value"],
        metrics(one["view"])["Step time"]["value"],
        *compared["values"],
        *(bar["total"] for bar in fastest["time"]["bars"]),
    ]
    assert seconds == pytest.approx([step_s] * len(seconds))
    assert metrics(page["view"])["Step time"]["by_cost_model"] < step_s
    known = metrics(one["view"])
    assert known["Model TFLOP/s per GPU"]["value"] / known["MFU"]["value"] == pytest.approx(
        989.4, rel=1e-3
    )
    (interval,) = (bar["interval"] for bar in one["view"]["memory"]["bars"] if bar["interval"])
    assert interval == [known["Memory"]["low"], known["Memory"]["high"]]
    large = learnt.get("/explorer.json", params=SETTINGS | at(tensor=1, pipeline=1)).json()["view"]
    fix = next(fix for fix in large["fixes"] if "GPUs" not in fix["change"])
    mended = learnt.get(fix["href"].replace("?", ".json?")).json()["view"]
    assert {each["name"]: each["value"] for each in fix["figures"]}["Step"] == pytest.approx(
        metrics(mended)["Step time"]["value"]
    )


def test_moving_a_slider_ranks_once(learnt: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = []
    recommend = ask.answer_recommend
    monkeypatch.setattr(
        ask,
        "answer_recommend",
        lambda query, **asked: ranked.append(query) or recommend(query, **asked),
    )
    for tensor_parallel in (8, 4, 2):
        settings = SETTINGS | {"training.global_batch_size": 384} | at(tensor_parallel, 4)
        assert learnt.get("/explorer", params=settings).status_code == 200
    assert len(ranked) == 1


def metrics(view: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {metric["name"]: metric for metric in view["metrics"]}
