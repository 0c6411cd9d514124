"""The answer of a search is the same wherever it is read, also where its runs disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.ports import Store
from hp_tool.domain.units import format_duration
from hp_tool.loop.tuning import TuneResult, tune
from hp_tool.questions import schema
from hp_tool.wording.answer import answer_headline
from service.dashboard import formats
from tests.tuning.cpu_engine import CpuEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page

BASELINE = {"tensor_parallel_size": 2, "micro_batch_size": 1}


def noisy(request: ProfileRequest) -> Measurement:
    """Steps scatter, nobody leads clearly, and who runs again is a quarter slower."""
    seconds = 5.3 if request.parallel.micro_batch_size == 1 else 5.18 if request.steps > 5 else 4.18
    times = tuple(seconds * share for share in (0.5, 0.8, 1.0, 1.2, 1.5))
    return Measurement(
        status="ok", step_s=seconds, step_times_s=times, wall_s=10.0, peak_memory_bytes=1 << 30
    )


@pytest.fixture
def result(store: Store, query: dict[str, Any]) -> TuneResult:
    query["parallel"] = {
        "tensor_parallel_size": 2,
        "micro_batch_size": [1, 2],
        "recompute": "none",
        "zero_stage": 1,
        "sequence_parallel": True,
        "pipeline_parallel_size": 1,
    }
    query["search"] = {"budget_runs": 6, "baseline": BASELINE, "fidelity": "full"}
    query["training"]["total_tokens"] = 1e9
    query["cluster"]["price_per_gpu_hour"] = 2.0
    return tune(
        query=schema.parse_query(query), store=store, launcher=CpuEngine(num_gpus=2, outcome=noisy)
    )


def test_a_noisy_search_has_one_best(
    page: Page, server: str, http: TestClient, result: TuneResult, tmp_path: Path
) -> None:
    search, answer, best = result.search.id, result.answer, result.recommendations[0]
    assert answer is not None and answer.measured is not None and best.measurement is not None
    runs = http.get(f"/v1/searches/{search}/trials").json()["trials"]
    times = [
        run["measurement"]["step_s"]
        for run in runs
        if run["parallel"] == schema.to_dict(best.parallel)
    ]
    assert len(times) == 2 and max(times) / min(times) > 1.2, "the repeat disagrees"
    group = answer.measured
    assert (group.num_runs, group.low_s, group.high_s, group.step_s) == (
        2,
        min(times),
        max(times),
        best.measurement.step_s,
    )

    stored = http.get(f"/v1/searches/{search}/result").json()
    assert (
        stored["answer"]["step_s"]
        == stored["recommendations"][0]["calibrated_estimate"]["time"]["step_s"]
        == answer.step_s
    )
    assert http.get(f"/v1/searches/{search}").json()["progress"]["best_step_s"] == group.step_s

    (listed,) = http.get("/searches.json").json()["rows"]
    assert (listed["best_step_s"], listed["known"]) == (group.step_s, "measured"), (
        "what leads the page"
    )

    said = CliRunner().invoke(
        build(),
        ["tune", "--resume", search],
        env={"HP_DATABASE_URL": f"sqlite:///{tmp_path / 'hp.sqlite3'}", "COLUMNS": "400"},
    )
    assert answer_headline(answer) in said.output
    assert f"Measured {format_duration(group.step_s)} in the last of 2 runs" in said.output

    page.goto(f"{server}/searches/{search}")
    row = page.locator("tr.chosen")
    row.wait_for()
    banner = page.get_by_role("region", name="Keep your baseline")
    assert banner.get_by_text(answer_headline(answer)).is_visible()
    assert (
        banner.locator(".arithmetic").inner_text()
        == row.locator("a").inner_text()
        == formats.arithmetic(best.parallel, "device")
    )
    shown = [formats.seconds(each) for each in (group.step_s, answer.step_s)]
    assert [banner.locator("dd.lead").nth(place).inner_text() for place in (0, 1)] == shown
    columns = page.locator("[data-part=head] th").evaluate_all(
        "all => all.map((each) => each.dataset.column)"
    )
    cells = {
        name: row.locator("th, td").nth(columns.index(name)).inner_text()
        for name in ("measured", "calibrated")
    }
    assert [cell.splitlines()[0] for cell in cells.values()] == shown
    assert "2 runs, 4.18 s – 5.18 s" in cells["measured"]

    page.locator("[data-part=history]").scroll_into_view_if_needed()
    page.locator("[data-part=history] > svg").wait_for()
    drawn = page.evaluate(
        "() => "
        "Object.fromEntries(document.querySelector('[data-part=history]').figure.traces.map((t) => "
        "[t.name, t.y]))"
    )
    assert drawn["Best"] == [group.step_s]
    assert drawn["Best so far"][-1] == group.step_s
    page.emulate_media(
        media="print"
    )  # where nothing can be pressed, but headings that sort and numbers of runs stay
    assert page.get_by_role("columnheader", name="Measured").get_by_role("button").is_visible()
    assert (
        row.locator("[data-control=mark]").is_visible()
        and not page.get_by_role("link", name="CSV").is_visible()
    )
    front = page.evaluate(
        """() => fetch(document.querySelector("#trials").dataset.href).then((answer) => answer.json())"""  # noqa: E501
    )
    assert front["measured_step_s"][front["best"]] == group.step_s


def test_without_price_tokens_and_baseline_the_first_run_is_compared_with(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    search = tune(
        query=schema.parse_query(query), store=store, launcher=CpuEngine(num_gpus=2)
    ).search.id
    said = " ".join(http.get(f"/searches/{search}.json").json()["best"]["sentences"])
    assert "per step" in said and "$" not in said and "your baseline" not in said
    answer = http.get(f"/v1/searches/{search}/result").json()["answer"]
    assert answer["baseline"]["source"] == "first run"
    low, high = answer["step_s_interval"]
    assert low < answer["step_s"] < high and answer["outside"] is False


def test_an_illegal_baseline_is_refused_by_its_field(
    http: TestClient, query: dict[str, Any]
) -> None:
    query["search"]["baseline"] = {"tensor_parallel_size": 3}
    refused = http.post("/v1/searches", json=query)
    assert (refused.status_code, refused.json()["field"]) == (422, "search.baseline"), json.dumps(
        refused.json()
    )
