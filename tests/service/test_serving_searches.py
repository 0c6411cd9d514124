"""A search for a way to serve, as the API and the dashboard show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Latencies, Tail, Tails
from hp_tool.domain.ports import Store
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from hp_tool.store import open_store
from service.app import create_app
from service.dashboard import formats
from service.dashboard.trials import compared_quantity, missed_targets
from service.settings import Settings
from tests.service.coordinator import claim
from tests.tuning.serving_engine import FACTOR, ServingEngine
from tests.tuning.test_serving_search import query

TARGET_S = 0.1
TARGETS = {
    "time to first token": "ttft_s",
    "time per output token": "tpot_s",
    "request latency": "request_latency_s",
}
Searched = tuple[TestClient, Store, str]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searched]:
    """A service over a store with one such search, whose every latency is three times the cost
    model's.
    """
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('serving') / 'hp.sqlite3'}")
    asked = query(search={"budget_runs": 4}, targets={"tpot_s": TARGET_S})
    found = tune(query=asked, store=store, launcher=ServingEngine(num_gpus=2))
    app = create_app(Settings(poll_s=0.02), store=store)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client, store, found.search.id
    store.close()


def test_its_trials_and_its_result_are_served(searched: Searched) -> None:
    http, _, search = searched
    trials = http.get(f"/v1/searches/{search}/trials").json()["trials"]
    assert len(trials) == 4 and all(trial["calibrated"]["step_s"] > 0 for trial in trials)
    best = http.get(f"/v1/searches/{search}/result").json()["recommendations"][0]
    assert best["measurement"]["serving"]["tpot_s"] > 0


def test_missed_targets_on_quantiles_are_named() -> None:
    tails = Tails(
        **dict.fromkeys(("ttft_s", "tpot_s", "request_latency_s"), Tail(p50=0.1, p90=0.2, p99=0.9))
    )
    seen = Latencies(ttft_s=0.12, tpot_s=0.01, request_latency_s=1.0, tails=tails)
    asked = {"targets": {"ttft_s": 0.2, "ttft_p90_s": 0.3, "ttft_p99_s": 0.5, "tpot_s": None}}
    assert missed_targets(seen, asked) == (
        "900.0 ms to the first token (p99) is 1.80 times the target of 500.0 ms",
    )
    assert missed_targets(replace(seen, tails=None), asked) == ()
    assert compared_quantity({"kind": "inference", "targets": {"ttft_p99_s": 0.5}}).charged


def test_its_page_speaks_of_latencies_and_not_of_steps(searched: Searched) -> None:
    http, _, search = searched
    page, twin = http.get(f"/searches/{search}").text, http.get(f"/searches/{search}.json").json()
    quantity = {
        "seconds": "Request latency",
        "charged": True,
        "rate": "Output tokens/s per device",
        "device": "device",
    }
    assert twin["quantity"] == quantity
    assert (
        "Step" not in page
        and "Time to first token and throughput" in page
        and "target 100.0 ms" in page
    )
    best = twin["best"]
    assert (
        best["measured"]
        and "replica" in best["arithmetic"]
        and "concurrent request" in best["details"]
    )
    for latency in best["latencies"]:
        assert latency["measured_s"] == pytest.approx(FACTOR * latency["predicted_s"], rel=0.01)
    first, each, whole = (formats.seconds(latency["measured_s"]) for latency in best["latencies"])
    measured = (
        f"Measured {first} to the first token, {each} per output token and {whole} per request "
        "in one run."
    )
    said = best["sentences"]
    assert (
        measured in said
        and "calibrated by 4 runs" in said[1]
        and "per device" in said[1]
        and "GPU" not in " ".join(said)
    )
    ran = http.get(twin["trials_href"]).json()
    ran_words = set(zip(ran["arithmetic"], ran["details"], strict=True))
    rivals = {(rival["arithmetic"], rival["details"]) for rival in best["rivals"]}
    assert (
        rivals
        and not rivals & ran_words
        and f"{len(rivals)} untested layouts may be faster" in page
    )
    (listed,) = http.get("/searches.json").json()["rows"]
    assert (listed["known"], page.count("The shaded region meets the target.")) == (
        "measured",
        2,
    ), "of one chart: its caption and name"
    assert best["sentences"][-1].startswith(
        f"The cost model alone was {FACTOR:.1f} times too fast: "
    )
    row = http.get(f"/v1/searches/{search}/result").json()["recommendations"][0]
    assert listed["best_step_s"] == row["measurement"]["load"]["request_latency_s"], (
        "what leads the page"
    )
    for latency in best["latencies"]:
        name = TARGETS[latency["name"]]
        assert latency["measured_s"] == row["measurement"]["load"][name], "what was measured"
        assert latency["known_s"] == row["calibrated_estimate"][name] != latency["measured_s"], (
            "the answer's estimate"
        )
        assert f'<dd class="lead">{formats.seconds(latency["measured_s"])}</dd>' in page
        assert f"calibrated {formats.seconds(latency['known_s'])}<" in page
    targets = {each["name"]: each["target_s"] for each in best["latencies"]}
    assert targets == {
        "time to first token": None,
        "time per output token": TARGET_S,
        "request latency": None,
    }


def test_where_no_run_keeps_to_the_target_the_nearest_is_shown_and_not_called_the_best(
    searched: Searched,
) -> None:
    http, store, _ = searched
    asked = query(search={"budget_runs": 1}, targets={"tpot_s": 1e-5})
    found = tune(query=asked, store=store, launcher=ServingEngine(num_gpus=2))
    page, best = (http.get(f"/searches/{found.search.id}{rest}") for rest in ("", ".json"))
    assert "Closest to the targets" in page.text and "Best configuration</h2>" not in page.text
    (miss,) = best.json()["best"]["misses"]
    assert (
        " per output token is " in miss
        and miss.endswith("times the target of 10 us")
        and miss in page.text
    )


def test_its_columns_hold_what_was_predicted_and_measured_under_the_whole_load(
    searched: Searched,
) -> None:
    http, _, search = searched
    table = http.get(f"/searches/{search}/trials.json").json()
    serving = table["serving"]
    assert {axis["label"] for axis in table["axes"]} <= {"TP", "Concurrent requests"}
    assert serving["targets"] == {"tpot_s": TARGET_S}
    for name in ("ttft_s", "tpot_s"):
        assert serving[name] == pytest.approx(
            [FACTOR * guess for guess in serving[f"predicted_{name}"]], rel=0.01
        )
    for latency, first, each in zip(
        serving["request_latency_s"], serving["ttft_s"], serving["tpot_s"], strict=True
    ):
        assert latency == pytest.approx(first + 31 * each)
    missed = [bool(misses) for misses in serving["misses"]]
    assert missed == [tpot > TARGET_S for tpot in serving["tpot_s"]]
    # What is compared is the latency, and more than it only where a target is missed.
    charged = [
        step > 1.001 * seen
        for step, seen in zip(table["measured_step_s"], serving["request_latency_s"], strict=True)
    ]
    assert charged == missed
    assert table["best"] is not None and not missed[table["best"]]


def test_its_runs_lead_to_pages_of_whole_deployments(searched: Searched) -> None:
    http, _, search = searched
    a, b, *_ = http.get(f"/searches/{search}/trials.json").json()["run_id"]
    page = http.get(f"/searches/{search}/runs/{a}")
    assert page.status_code == 200 and "Time to first token" in page.text
    runs = [f"/searches/{search}/runs/{run}" for run in (a, b)]
    twin = http.get("/compare.json", params={"more": runs}).json()
    rows = [
        (row["name"], row["measured"], row["values"][0])
        for row in twin["rows"]
        if row["name"] == "Time to first token"
    ]
    (_, before, guess), (_, after, seen) = rows
    assert (before, after) == (False, True)
    assert guess == pytest.approx(seen, rel=0.05), "its search's estimate, not the cost model's"
    (series,) = http.get("/calibration.json").json()["series"]
    learnt = http.get(series["href"]).text
    assert "Error of request latency" in learnt and "Outliers" not in learnt
    for path in ("/measurements", "/searches"):
        assert "replica" in http.get(path).text


def test_one_that_runs_exports_its_leader_as_a_deployment(searched: Searched) -> None:
    http, store, _ = searched
    search = http.post("/v1/searches", json=schema.query_mapping(query())).json()["id"]
    lease = claim(store, search)
    store.set_progress(
        lease=lease, progress={"best_parallel": {"tensor_parallel_size": 2, "max_num_seqs": 4}}
    )
    text = http.get(f"/searches/{search}/export", params={"format": "vllm"}).text
    assert "--tensor-parallel-size 2" in text and "--max-num-seqs 4" in text
    assert "TP 2 x 1 replica" in http.get("/searches").text


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searched]:
    """A service over a store with a search whose TTFT is 1.6 times and whose TPOT is 3 times the
    cost model's.
    """
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('uneven') / 'hp.sqlite3'}")
    asked = query(search={"budget_runs": 4}, targets={"tpot_s": TARGET_S})
    found = tune(
        query=asked,
        store=store,
        launcher=ServingEngine(num_gpus=2, ttft_factor=1.6, tpot_factor=3.0),
    )
    with TestClient(
        create_app(Settings(poll_s=0.02), store=store), base_url="http://127.0.0.1:8000"
    ) as client:
        yield client, store, found.search.id
    store.close()


def test_a_factor_is_that_of_the_two_latencies_beside_it(uneven: Searched) -> None:
    http, _, search = uneven
    best = http.get(f"/searches/{search}.json").json()["best"]
    said = next(
        sentence
        for sentence in best["sentences"]
        if sentence.startswith("The cost model alone was")
    )
    pairs = [(each["predicted_s"], each["measured_s"]) for each in best["latencies"]]
    ratios = [measured / predicted for predicted, measured in pairs]
    assert max(ratios) > 1.5 * min(ratios)
    predicted, measured = pairs[ratios.index(sorted(ratios)[1])]
    factor = measured / predicted
    assert f"was {factor:.1f} times too fast: {formats.seconds(predicted)} " in said
    assert said.endswith(f", measured {formats.seconds(measured)}.")


def test_a_configuration_has_one_measured_rate_and_latency_on_every_page(uneven: Searched) -> None:
    http, _, search = uneven
    twin = http.get(f"/searches/{search}.json").json()
    runs = http.get(f"/searches/{search}/trials.json").json()
    assert (
        twin["best"]["tokens_per_second_per_gpu"] == runs["tokens_per_second_per_gpu"][runs["best"]]
    )
    assert (
        twin["best"]["tokens_per_second_per_gpu"]
        != twin["best"]["calibrated_tokens_per_second_per_gpu"]
    )
    page = http.get(f"/searches/{search}").text
    assert "Output tokens/s per device, measured" in page
    (listed,) = http.get("/searches.json").json()["rows"]
    assert (
        listed["best_step_s"]
        == twin["best"]["step_s"]
        == twin["best"]["latencies"][2]["measured_s"]
    )
    assert listed["known"] == "measured"


def test_a_running_search_that_misses_its_targets_lists_the_latency_without_the_penalty(
    store: Store,
) -> None:
    asked = query(search={"budget_runs": 1}, targets={"tpot_s": 1e-5})
    found = tune(query=asked, store=store, launcher=ServingEngine(num_gpus=2))
    (run,) = store.runs(search_id=found.search.id)
    assert run.measurement is not None and run.measurement.load is not None
    assert run.measurement.objective_s != run.measurement.load.request_latency_s
    progress = store.get_search(search_id=found.search.id).progress
    assert progress["best_measured_s"] == run.measurement.load.request_latency_s
