"""Pages without a browser: what they say, their JSON twins, and that nothing a user wrote becomes
markup.
"""

import gzip
import json
import re
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from hp_tool.loop.search.underway import Underway
from hp_tool.store.runs import RUN
from hp_tool.store.sql import SqlStore
from service.api.views import SearchView
from service.dashboard import formats
from service.dashboard.live import list_running
from service.dashboard.page import STATIC
from service.dashboard.search import seconds_left
from tests.service.coordinator import claim, finish, one_run

Query = dict[str, Any]
TWO_WAY = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, recompute="selective")
EVIL = "<script>alert('x')</script>"


def submit(http: TestClient, query: Query) -> str:
    search_id: str = http.post("/v1/searches", json=query).json()["id"]
    return search_id


def test_the_arithmetic_of_a_configuration() -> None:
    assert formats.arithmetic(TWO_WAY) == "TP 2 x PP 1 x DP 1 = 2 GPUs"
    assert formats.arithmetic(TWO_WAY, "device") == "TP 2 x PP 1 x DP 1 = 2 devices"
    assert formats.arithmetic(ParallelConfig()) == "TP 1 x PP 1 x DP 1 = 1 GPU"
    assert formats.details(TWO_WAY) == "micro-batch 1, sequence parallel, selective recomputation"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.seconds(None), "–"),
        (formats.seconds(0.31049), "310.5 ms"),
        (formats.seconds(12.345), "12.35 s"),
        (formats.seconds(-0.0001), "-100 µs"),
        (formats.seconds(1234.5), "1,234 s"),
        (formats.percent(-0.0712), "−7.1%"),
        (formats.gib(3 * 2**30), "3.00 GiB"),
        (formats.billions(1.008e12), "1.01 T"),
        (formats.share(2.4e-11), "below 0.01%"),
        (formats.tick(1.5, "seconds"), "1.5 s"),
        (formats.measured(3.9, "dollars"), "$3.90"),
        (formats.words("gpus_per_node"), "GPUs per node"),
        (formats.count(1651.6), "1,652"),
    ],
)
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


def test_a_search_its_twin_and_its_trials(http: TestClient, store: Store, query: Query) -> None:
    search = submit(http, query)
    lease = claim(store, search)
    one_run(store, lease, Measurement(status="ok", step_s=0.4, tokens_per_second_per_gpu=1280.0))
    one_run(store, lease, Measurement(status="crashed", cause=EVIL, log_tail=EVIL), TWO_WAY)
    running = http.get(f"/searches/{search}.json").json()["best"]
    assert (running["measured"], running["step_s"], running["predicted_step_s"]) == (True, 0.4, 0.5)
    finish(store, lease)
    page, twin = http.get(f"/searches/{search}"), http.get(f"/searches/{search}.json").json()
    assert page.headers["content-type"].startswith("text/html")
    assert (
        '<abbr title="tensor parallel ranks">TP</abbr> 1 x ' in page.text
        and " 2 = 2 devices" in page.text
    )
    assert twin["best"]["arithmetic"] == "TP 1 x PP 1 x DP 2 = 2 devices"
    assert twin["events_href"] is None
    trials = http.get(twin["trials_href"]).json()
    assert (trials["best"], trials["state"], trials["cause"]) == (
        0,
        ["ok", "crashed"],
        [None, EVIL],
    )
    assert (trials["predicted_step_s"], trials["calibrated_step_s"], trials["measured_step_s"]) == (
        [0.5] * 2,
        [0.41] * 2,
        [0.4, None],
    )
    assert {axis["label"]: axis["values"] for axis in trials["axes"]} == {
        "TP": [1, 2],
        "DP": [2, 1],
        "Sequence parallel": [False, True],
        "Recomputation": ["none", "selective"],
    }
    log = http.get(twin["logs_href"] + trials["run_id"][1])
    assert (log.text, log.headers["content-type"]) == (EVIL, "text/plain; charset=utf-8")
    configuration = http.get(
        f"/searches/{search}/runs/{trials['run_id'][1]}.json", follow_redirects=False
    ).json()
    assert configuration["view"]["heading"] == "TP 2 x PP 1 x DP 1 = 2 devices", (
        "a short address shows the page itself"
    )
    runs = [f"/searches/{search}/runs/{run_id}" for run_id in trials["run_id"]]
    assert "measured" in http.get("/compare", params={"more": runs}).text
    both = http.get("/compare.json", params={"more": runs}).json()
    step = [(row["measured"], row["values"]) for row in both["rows"] if row["name"] == "Step time"]
    assert len(step) == 2 and step[1] == (True, [0.4, None])
    assert [(run["state"], run["cause"]) for run in both["runs"]] == [
        ("ok", None),
        ("crashed", EVIL),
    ]
    assert (
        both["verdict"] == "Use Run 1: Run 1 took 400.0 ms a step, measured; but Run 2 crashed."
    ), "no ratio of a run that failed"
    mixed = http.get("/compare", params={"first": runs[0], "second": json.dumps(query)})
    assert mixed.status_code == 200
    assert "was not measured" in mixed.text and "400.0 ms" in mixed.text
    alone = http.get(
        "/compare.json", params={"first": runs[0], "second": json.dumps(query)}
    ).json()["verdict"]
    assert "by predictions alone: " in alone and "took 400.0 ms a step." in alone
    nothing = http.get("/compare.json", params={"first": f"/searches/{search}/runs/{'0' * 16}"})
    assert (nothing.status_code, nothing.json()["code"]) == (422, "not_found")
    text = http.get(f"/searches/{search}/runs/{trials['run_id'][0]}").text
    parts = [text.index(f">{name}") for name in ("Predicted before", "Measured", "Learned")]
    assert parts[0] < text.index("500.0 ms") < parts[1] < text.index("400.0 ms") < parts[2]
    measured = http.get(f"{runs[0]}.json").json()["measured"]
    assert measured["text"] == (
        "Measured 400.0 ms a step; predicted before the run 500.0 ms: 20% shorter than predicted."
    )
    assert measured["text"] in text and (measured["inside"], measured["word"]) == (None, ""), (
        "no interval was stored"
    )
    assert http.get(f"{runs[1]}.json").json()["measured"]["text"] == f"It crashed: {EVIL}."
    table = http.get(f"/searches/{search}/runs.json").json()
    assert (
        table["verdict"] == "Run 1 is best: 400.0 ms, measured; run 2 crashed."
        and table["name"] == twin["subject"]
    )
    assert http.get(f"/searches/{search}/runs/{'0' * 16}").status_code == 404


def test_the_best_configuration_in_another_tools_words(
    http: TestClient, store: Store, query: Query
) -> None:
    search = submit(http, query)
    assert http.get(f"/searches/{search}.json").json()["export_href"] is None
    assert http.get(f"/searches/{search}/export?format=megatron-lm").status_code == 404
    one_run(store, claim(store, search), Measurement(status="ok", step_s=0.4), TWO_WAY)
    shown = http.get(f"/searches/{search}/export", params={"format": "megatron-lm"})
    assert "--tensor-model-parallel-size 2" in shown.text
    assert (
        http.get(f"/searches/{search}/export", params={"format": '"; x="'}).json()["field"]
        == "format"
    )


def test_time_left_is_bounded_by_the_budget_that_runs_out_first(
    http: TestClient, store: Store, query: Query
) -> None:
    query["search"]["budget_gpu_seconds"] = 16.0
    search = submit(http, query)
    one_run(
        store, claim(store, search), Measurement(status="ok", step_s=0.4)
    )  # 1 of 4 runs, 12 of 16 GPU-seconds
    record = store.get_search(search_id=search)
    assert record.started_at is not None
    now = record.started_at + timedelta(seconds=30)
    assert seconds_left(SearchView.of(record), now=now) == pytest.approx(10)


def test_a_recommendation_that_was_never_run_says_so(
    http: TestClient, store: Store, query: Query
) -> None:
    search = submit(http, query)
    finish(store, claim(store, search))
    best = http.get(f"/searches/{search}.json").json()["best"]
    assert (best["measured"], best["step_s"]) == (False, 0.5)
    assert "predicted, not measured" in http.get(f"/searches/{search}").text


def test_a_run_in_progress_is_compared_with_the_newest(
    http: TestClient, store: SqlStore, query: Query
) -> None:
    lease = claim(store, submit(http, query))
    configs = [ParallelConfig(data_parallel_size=2, micro_batch_size=size) for size in range(1, 23)]
    runs = [
        one_run(store, lease, Measurement(status="ok", step_s=0.4), config) for config in configs
    ]
    with store._engine.begin() as connection:
        for seconds, run in enumerate(runs):
            ended = datetime(2026, 1, 1, 0, 0, seconds, tzinfo=UTC)
            begun = ended - timedelta(seconds=seconds)
            connection.execute(
                sa.update(RUN).where(RUN.c.id == run).values(submitted_at=begun, finished_at=ended)
            )
    waits = store.intend_run(lease=lease, parallel=TWO_WAY, fidelity=Fidelity(), predicted={})
    store.mark_submitted(lease=lease, run_id=waits.id, handle="43")
    (running,) = list_running(store, store.get_search(search_id=lease.search_id))
    assert (running.usual_s, running.phase) == (11.5, None), "the median of 2 to 21 seconds"


def test_a_run_in_progress_says_what_it_does(http: TestClient, store: Store, query: Query) -> None:
    lease = claim(store, submit(http, query | {"search": {"steps": 5, "warmup_steps": 2}}))
    run = store.intend_run(lease=lease, parallel=TWO_WAY, fidelity=Fidelity(), predicted={})
    store.mark_submitted(lease=lease, run_id=run.id, handle="43")

    def shown(seen: Underway) -> tuple[dict[str, Any], str]:
        store.set_progress(lease=lease, progress={"underway": {run.id: asdict(seen)}})
        address = f"/searches/{lease.search_id}"
        (running,) = http.get(f"{address}.json").json()["running"]
        return running, http.get(address).text

    assert "waiting for devices" in shown(Underway(phase="queued"))[1]
    assert "starting up" in shown(Underway(phase="start-up", log_tail="building the model"))[1]
    assert http.get(f"/searches/{lease.search_id}/logs/{run.id}").text == "building the model"
    assert (
        "warming up, 1 step done"
        in shown(Underway(phase="warm-up", warmup_steps=1, step_s=90.0))[1]
    )
    running, text = shown(
        Underway(phase="steps", warmup_steps=2, steps=3, step_s=60.0, log_tail=EVIL)
    )
    assert "measuring, step 3 of 5" in text and EVIL not in text
    assert "0 done, 1 running, of at most" in text
    trials = http.get(f"/searches/{lease.search_id}/trials.json").json()
    assert (trials["state"], trials["now"]) == (["submitted"], ["measuring"]), (
        "the table says what the page says"
    )
    assert datetime.fromisoformat(running["ends_at"]) - datetime.now(UTC) == pytest.approx(
        timedelta(0, 120), abs=timedelta(0, 30)
    )


def test_a_search_whose_worker_fell_silent_is_stalled(
    http: TestClient, store: Store, query: Query
) -> None:
    search = submit(http, query)
    assert store.claim_search(holder="host-7", lease_s=1e-3, search_id=search) is not None
    time.sleep(0.01)
    (row,) = http.get("/searches.json").json()["rows"]
    assert (row["state"], row["worker"], row["stalled"]) == ("running", "host-7", True)
    assert "worker stopped responding" in http.get("/searches").text
    assert "Worker host-7 stopped responding" in http.get(f"/searches/{search}").text


def test_the_only_run_is_not_called_the_fastest(
    http: TestClient, store: Store, query: Query
) -> None:
    lease = claim(store, submit(http, query))

    def said() -> str:
        (sentence,) = http.get(f"/searches/{lease.search_id}.json").json()["best"]["sentences"]
        return str(sentence)

    one_run(store, lease, Measurement(status="ok", step_s=0.4))
    assert said() == "Measured 400.0 ms in one run, the only run so far."
    assert "Choosing the next run." in http.get(f"/searches/{lease.search_id}").text
    one_run(store, lease, Measurement(status="crashed"), TWO_WAY)
    assert said() == "Measured 400.0 ms in one run, the fastest so far."
    store.finish_search(lease=lease, state=SearchState.CANCELLED, stopped_because="cancelled")
    assert http.get(f"/searches/{lease.search_id}.json").json()["best"] is None


def test_nothing_a_user_wrote_becomes_markup(http: TestClient, store: Store, query: Query) -> None:
    query["model"]["name"] = EVIL
    search = submit(http, query)
    one_run(store, claim(store, search), Measurement(status="crashed", cause=EVIL, log_tail=EVIL))
    failed = http.get(f"/searches/{search}.json").json()["failed_so_far"]
    assert failed == f"The first run crashed: {EVIL}. 3 runs left."
    for path in (
        "/",
        "/searches",
        f"/searches/{search}",
        f"/searches?cursor={EVIL}",
        f"/searches/{EVIL}",
    ):
        text = http.get(path).text
        assert EVIL not in text
        assert re.findall(r"<script(?!(?: type=\"module\")? src=\"/static/)", text) == []
        assert (
            re.findall(r"\s(?:style|on\w+)=", text) == []
        )  # the content policy would refuse them anyway


def test_nothing_a_user_wrote_hides_or_turns_what_stands_beside_it(
    http: TestClient, store: Store, query: Query
) -> None:
    name = "gpt\u202eexe.\u2066\x1b[2Jx"
    search = store.create_search(query=query | {"model": query["model"] | {"name": name}}).id
    for path in ("/", f"/searches/{search}", f"/searches/{search}/configuration?run=0"):
        text = http.get(path).text
        assert not {"\u202e", "\u2066", "\x1b"} & set(text), path
    assert "gpt\\u202eexe.\\u2066\\u001b[2Jx" in http.get("/searches").text
    assert http.get(f"/v1/searches/{search}").json()["query"]["model"]["name"] == name


def test_the_list_is_filtered_by_its_url(http: TestClient, store: Store, query: Query) -> None:
    searches = [submit(http, query) for _ in range(3)]
    store.finish_search(lease=claim(store, searches[0]), state=SearchState.CANCELLED)
    assert len(http.get("/searches.json").json()["rows"]) == 3
    rows = http.get("/searches.json", params={"state": "cancelled"}).json()["rows"]
    assert [row["href"] for row in rows] == [f"/searches/{searches[0]}"]
    assert http.get("/?state=&kind=&model=&owner=&since=").status_code == 200
    assert http.get("/searches?kind=dreaming").status_code == 422
    for wrong in ("state=asleep", "kind=dreaming", "since=yesterday", "since=20260131x"):
        assert http.get(f"/?{wrong}").status_code == 422


def test_the_lists_address_keeps_every_filter(http: TestClient, store: Store, query: Query) -> None:
    for _ in range(51):
        submit(http, query)
    other = submit(http, query | {"model": query["model"] | {"name": "gpt-other"}})
    kept = {"kind": "training", "model": "gpt-tiny", "since": "2026-01-01"}
    page, twin = http.get("/searches", params=kept), http.get("/searches.json", params=kept).json()
    assert len(twin["rows"]) == 50 and twin["filters"]["model"] == "gpt-tiny"
    for href in (twin["next_href"], twin["json_href"]):
        assert {name: [value] for name, value in kept.items()}.items() <= parse_qs(
            urlsplit(href).query
        ).items()
    assert 'value="gpt-tiny"' in page.text and 'value="2026-01-01"' in page.text
    rows = http.get("/searches.json", params={"model": "gpt-other", "kind": ""}).json()["rows"]
    assert [row["href"] for row in rows] == [f"/searches/{other}"]
    assert "No matching searches" in http.get("/searches", params={"kind": "inference"}).text
    assert http.get("/searches.json", params={"since": "2100-01-01"}).json()["rows"] == []


def test_older_searches_are_a_link_away(http: TestClient, query: Query) -> None:
    for _ in range(51):
        submit(http, query)
    first = http.get("/searches.json").json()
    assert len(first["rows"]) == 50
    assert first["next_href"] in http.get("/searches").text.replace("&amp;", "&")
    assert http.get(first["next_href"]).text.count('<a class="break" href="/searches/') == 1


def test_buttons_post_and_come_back(http: TestClient, store: Store, query: Query) -> None:
    search = submit(http, query)
    page = http.get(f"/searches/{search}").text
    assert re.findall(r'method="post" action="(.*?)"', page) == [
        f"/searches/{search}/{each}" for each in ("pause", "cancel", "budget", "label")
    ]
    response = http.post(f"/searches/{search}/cancel", follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, f"/searches/{search}")
    assert store.get_search(search_id=search).state is SearchState.CANCELLED
    forged = http.post(
        f"/searches/{search}/budget",
        content="budget_runs=9",
        headers={"Origin": "https://evil.example"},
    )
    assert forged.status_code == 403
    forged = http.post(f"/searches/{search}/clone", headers={"Origin": "https://evil.example"})
    assert forged.status_code == 403


def test_a_budget_is_changed_from_the_page(http: TestClient, store: Store, query: Query) -> None:
    search = submit(http, query)
    page = http.get(f"/searches/{search}").text
    assert f'action="/searches/{search}/budget"' in page
    assert (
        http.post(
            f"/searches/{search}/budget", content="budget_runs=9", follow_redirects=False
        ).status_code
        == 303
    )
    assert store.get_search(search_id=search).query["search"]["budget_runs"] == 9
    for wrong in ("many", "0", "-1", "9" * 9, "9" * 5000):
        answer = http.post(f"/searches/{search}/budget", content=f"budget_runs={wrong}")
        assert (answer.status_code, answer.json()["field"]) == (422, "budget_runs"), wrong


def test_static_files_are_cached_for_ever_under_their_digest(http: TestClient) -> None:
    page = http.get("/searches").text
    files = re.findall(r'"(/static/[0-9a-f]{12}/.*?)"', page)
    assert len(files) == 9
    for file in files:
        response = http.get(file)
        assert response.status_code == 200
        assert "immutable" in response.headers["cache-control"]
    assert http.get("/static/0000/app.css").status_code == 404
    assert http.get(files[0].rsplit("/", 1)[0] + "/../../app.py").status_code == 404


def test_scripts_and_styles_are_light() -> None:
    """All of them together, as browsers get them."""
    sent = sum(len(gzip.compress(path.read_bytes())) for path in STATIC.iterdir())
    assert sent <= 250_000
