"""A search's end says one thing: choice, headline, gain, axes, table, page and comparison rest on
one estimate of a layout.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.ports import Store
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from tests.tuning.cpu_engine import CpuEngine
from tests.tuning.serving_engine import ServingEngine

BETTER, NOT_BETTER = "Use this configuration", "No clear winner: take this layout"
ROOT = Path(__file__).parents[2]


def measured(step_s: float) -> Measurement:
    """A run whose steps hardly scatter."""
    times = tuple(step_s * share for share in (0.999, 1.0, 1.001))
    return Measurement(
        status="ok", step_s=step_s, step_times_s=times, wall_s=10.0, peak_memory_bytes=1 << 30
    )


def erratic(seed: int) -> Any:
    """Every configuration takes its own time, whatever the cost model says of it."""

    def outcome(request: ProfileRequest) -> Measurement:
        own = random.Random(f"{seed} {schema.to_json(request.parallel)}")
        return measured(4.0 * math.exp(own.gauss(0.0, 0.5)))

    return outcome


def search(query: dict[str, Any], store: Store, outcome: Any, **settings: Any) -> dict[str, Any]:
    query["search"] |= {"budget_runs": 6, "fidelity": "full", "min_gain_fraction": 0.0} | settings
    result = tune(
        query=schema.parse_query(query),
        store=store,
        launcher=CpuEngine(num_gpus=2, outcome=outcome),
    )
    return json.loads(schema.to_json(result))


@pytest.mark.parametrize("seed", range(4))
def test_choice_headline_gain_table_and_axes_agree(
    http: TestClient, store: Store, query: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    result = search(query, store, erratic(seed))
    answer, rows, name = result["answer"], result["recommendations"], result["search"]["id"]
    first = http.get(f"/v1/searches/{name}/trials").json()["trials"][0]
    known = {json.dumps(row["parallel"]): row["calibrated_estimate"] for row in rows}
    best, own = known[json.dumps(answer["parallel"])], known[json.dumps(first["parallel"])]
    steps = [row["calibrated_estimate"]["time"]["step_s"] for row in rows if row["measurement"]]

    assert answer["parallel"] == rows[0]["parallel"]
    assert (
        answer["step_s"] == best["time"]["step_s"]
        and answer["step_s_interval"] == best["intervals"]["step_s"]
    )
    assert steps[0] <= 1.01 * min(steps), "the choice rests on the numbers that the table shows"
    gain = answer["gain"]
    assert gain["against"] == answer["baseline"]["source"] == "first run"
    assert answer["baseline"]["parallel"] == first["parallel"]
    assert answer["baseline"]["step_s"] == own["time"]["step_s"]
    assert gain["factor"] >= 1.0 and gain["factor"] == answer["baseline"]["speedup"]
    estimated = own["time"]["step_s"] / best["time"]["step_s"]
    if rows[0]["measurement"]:
        assert gain["source"] == "measured"
        assert gain["factor"] == pytest.approx(
            first["measurement"]["step_s"] / rows[0]["measurement"]["step_s"]
        )
        low, high = gain["interval"]
        assert low <= estimated <= high and abs(math.log(gain["factor"] / estimated)) < 0.05, (
            "what was measured dominates"
        )
    else:
        assert gain["source"] == "predicted" and gain["factor"] == pytest.approx(estimated)
    assert answer["clearly_better"] is (gain["interval"][0] > 1.0)
    fastest = min(row["calibrated_estimate"]["time"]["step_s"] for row in rows)
    for values in result["axes"].values():
        assert min(values.values()) == pytest.approx(fastest)
    for row in rows:
        if row["measurement"]:
            low, high = row["calibrated_estimate"]["intervals"]["step_s"]
            assert 0.95 * low <= row["measurement"]["step_s"] <= 1.05 * high

    page = http.get(f"/searches/{name}").text
    state = answer["verdict"]["state"]
    assert (BETTER in page, NOT_BETTER in page) == (state == "use", state == "tied")
    assert state != "use" or answer["clearly_better"]
    said = CliRunner().invoke(
        build(),
        ["tune", "--resume", name],
        env={"HP_DATABASE_URL": f"sqlite:///{tmp_path / 'hp.sqlite3'}", "COLUMNS": "400"},
    )
    assert (BETTER in said.output, NOT_BETTER in said.output) == (state == "use", state == "tied")
    if state == "use":
        low, high = gain["interval"]
        assert (
            f"{gain['factor']:.2f} times the first run's speed ({low:.2f} to {high:.2f}, "
            f"{gain['source']})" in said.output
        )
    trials = http.get(f"/v1/searches/{name}/trials").json()["trials"]
    other = next(each for each in trials if each["parallel"] != first["parallel"])
    runs = [f"/searches/{name}/runs/{each['run_id']}" for each in (first, other)]
    beside = http.get("/compare.json", params={"more": runs}).json()
    step = next(row for row in beside["rows"] if row["name"] == "Step time" and not row["measured"])
    assert step["values"] == [
        known[json.dumps(each["parallel"])]["time"]["step_s"] for each in (first, other)
    ]


class ErraticServer(ServingEngine):
    """Its deployments take their own times, whatever the cost model says of them."""

    def fetch(self, handle: str) -> Measurement:
        run, own = (
            super().fetch(handle),
            random.Random(schema.to_json(self.requests[handle].parallel)),
        )
        times, slower = run.serving, math.exp(own.gauss(0.0, 0.5))
        assert times is not None
        changed = replace(
            times,
            ttft_s=slower * times.ttft_s,
            tpot_s=slower * times.tpot_s,
            ttft_times_s=tuple(slower * each for each in times.ttft_times_s),
            tpot_times_s=tuple(slower * each for each in times.tpot_times_s),
            output_tokens_per_second=times.output_tokens_per_second / slower,
        )
        return replace(run, serving=changed)


def test_a_serving_search_agrees_with_itself_too(http: TestClient, store: Store) -> None:
    query = schema.parse_mapping((ROOT / "examples" / "serving.yaml").read_text()) | {
        "targets": None
    }
    asked = schema.parse_query({name: value for name, value in query.items() if value is not None})
    result = json.loads(
        schema.to_json(tune(query=asked, store=store, launcher=ErraticServer(num_gpus=2)))
    )
    answer, rows, name = result["answer"], result["recommendations"], result["search"]["id"]
    first = http.get(f"/v1/searches/{name}/trials").json()["trials"][0]
    known = {json.dumps(row["parallel"]): row["calibrated_estimate"] for row in rows}
    best, own = known[json.dumps(answer["parallel"])], known[json.dumps(first["parallel"])]
    gain = answer["gain"]
    assert (
        answer["request_latency_s"] == best["request_latency_s"]
        and answer["ttft_s_interval"] == best["intervals"]["ttft_s"]
    )
    assert gain["factor"] == pytest.approx(
        own["request_latency_s"] / best["request_latency_s"], rel=0.05
    )
    assert gain["interval"][0] <= gain["factor"] <= gain["interval"][1]
    assert answer["clearly_better"] is (gain["interval"][0] > 1.0)
    by_run = {
        json.dumps(row["parallel"]): row["measurement"]["load"]
        for row in rows
        if row["measurement"]
    }
    both = [by_run[json.dumps(each["parallel"])]["request_latency_s"] for each in (first, answer)]
    assert gain["source"] == "measured" and gain["factor"] == pytest.approx(both[0] / both[1])
    page = http.get(f"/searches/{name}").text
    state = answer["verdict"]["state"]
    assert (BETTER in page, NOT_BETTER in page) == (state == "use", state == "tied")
    assert state != "use" or answer["clearly_better"]


def test_where_all_layouts_are_alike_none_is_sold(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    result = search(query, store, lambda request: measured(4.0))
    answer = result["answer"]
    low, high = answer["gain"]["interval"]
    assert low <= 1.0 <= high and answer["clearly_better"] is False
    page = http.get(f"/searches/{result['search']['id']}").text
    report = http.get(f"/searches/{result['search']['id']}/report").text
    for text in (page, report):
        assert NOT_BETTER in text and BETTER not in text and "card answer best" not in text


def test_a_cancelled_search_sells_nothing(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    ran = []

    def outcome(request: ProfileRequest) -> Measurement:
        if len(ran) == 1:
            (one,) = store.list_searches(limit=5).items
            http.post(f"/v1/searches/{one.id}/cancel")
        ran.append(request)
        return erratic(0)(request)

    result = search(query, store, outcome)
    assert result["search"]["state"] == "cancelled" and result["search"]["profile_runs"] >= 1
    page = http.get(f"/searches/{result['search']['id']}")
    assert (
        page.status_code == 200 and BETTER not in page.text and "card answer best" not in page.text
    )
