"""The page that explains uploads: readable without scripts, nothing kept but what its owner
ticks.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import hp_tool
from hp_tool.domain.access import Scope
from hp_tool.store import SqlStore
from hp_tool.traces.explain.explanation import Explanation
from service import keys
from tests.formats.test_timers import LEVEL_1, LEVEL_2, log
from tests.service.test_every_page import VIOLATIONS, _axe
from tests.timeline.made import training, write

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": {
        "num_hidden_layers": 6,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "vocab_size": 32_000,
    },
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 4},
    "training": {"sequence_length": 1024, "global_batch_size": 2},
    "parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(training(fault="slow_rank"), tmp_path_factory.mktemp("traces"), packed=True)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go: a server of this process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def sent(
    server: str, files: list[Path], *, headers: dict[str, str] | None = None, **texts: str
) -> httpx.Response:
    parts: list[Any] = [("trace", (path.name, path.read_bytes())) for path in files]
    parts += [(name, (None, text)) for name, text in texts.items()]
    return httpx.post(f"{server}/explain", files=parts, headers=headers, timeout=60)


def test_a_reader_without_scripts_has_a_run_explained(
    browser: Browser, server: str, store: SqlStore, traces: list[Path], kept: Path
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{server}/explain")
    page.locator("input[type=file]").set_input_files([str(path) for path in traces])
    page.locator("textarea").fill(json.dumps(QUERY))
    page.get_by_role("button", name="Explain").click()
    page.locator(".answered").wait_for()
    answer = hp_tool.explain(*traces, query=QUERY)
    assert isinstance(answer, Explanation)
    shown = page.locator(".answered li").all_inner_texts()
    assert shown == [finding.text for finding in answer.findings] and "Rank 3" in shown[0]
    assert f"Rank {answer.critical_rank} sets the pace." in page.locator(".headline").inner_text()
    parts = page.locator("section:has(#parts) tbody tr")
    assert (
        parts.first.locator("th").inner_text() == "compute"
        and parts.first.locator("td").count() == 4
    )
    assert page.locator("section:has(#ranks) tbody tr").count() == 4
    assert page.locator("tr.chosen .state").inner_text() == "critical"
    assert page.get_by_text("The files were deleted.").count() == 1
    assert not store.measurements(limit=1).items and not list(kept.iterdir())
    context.close()


def test_a_change_leads_to_its_configuration_and_what_runs_it(server: str, tmp_path: Path) -> None:
    """A step whose data parallelism nothing hides: to hide it is a change."""
    paths = write(training(fault="exposed_communication"), tmp_path)
    answer = hp_tool.explain(*paths, query=QUERY)
    assert isinstance(answer, Explanation) and answer.suggestions
    text = sent(server, paths, query=json.dumps(QUERY)).text
    for suggestion in answer.suggestions:
        assert suggestion.change.replace(" -> ", " → ") in text
    runs = [
        part.partition('"')[0].replace("&amp;", "&")
        for part in text.split('href="')[1:]
        if part.startswith("/run?")
    ]
    assert len(runs) == len(answer.suggestions)
    assert httpx.get(f"{server}{runs[0]}", timeout=60).status_code == 200


@pytest.mark.components
def test_a_step_is_kept_where_its_owner_ticks_it_and_may(
    server: str, store: SqlStore, traces: list[Path], kept: Path
) -> None:
    said = sent(server, traces, query=json.dumps(QUERY), keep="yes").text
    assert "stored: accepted" in said
    (record,) = store.measurements(limit=5).items
    answer = hp_tool.explain(*traces, query=QUERY)
    assert record.measurement.step_s == pytest.approx(answer.step_s)
    assert record.measurement.parts_s and record.measurement.parts_s["compute"] > 0.0
    assert "add the query of the recorded configuration" in sent(server, traces, keep="yes").text
    odd = QUERY | {"model": "gpt-22b", "parallel": {"tensor_parallel_size": 4}}
    assert (
        "Not stored: the trace does not match the query: the trace has"
        in sent(server, traces, query=json.dumps(odd), keep="yes").text
    )
    _, token = keys.issue(store=store, owner="reader", scope=Scope.READ)
    reader = {"Authorization": f"Bearer {token}"}
    assert (
        "your key cannot store measurements"
        in sent(server, traces, headers=reader, query=json.dumps(QUERY), keep="y").text
    )
    assert len(store.measurements(limit=5).items) == 1 and not list(kept.iterdir())


def test_a_log_is_explained_and_looks_right_in_both_schemes(
    page: Page, server: str, tmp_path: Path
) -> None:
    written = log(tmp_path / "train.log", "all", timers=LEVEL_1 | LEVEL_2, slow={2: 1.2})
    page.goto(f"{server}/configurations?query={json.dumps(QUERY)}")
    page.get_by_role("link", name="Explain a run of this configuration").click()
    page.locator("input[type=file]").set_input_files(str(written))
    page.get_by_role("button", name="Explain").click()
    page.locator("#timers").wait_for()
    assert any(
        each.startswith("Rank 2 takes") for each in page.locator(".answered li").all_inner_texts()
    )
    assert (
        page.locator("section:has(#parts) tbody th").first.inner_text()
        == "forward and backward passes"
    )
    page.evaluate(_axe())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert page.evaluate(VIOLATIONS, {}) == []


def test_what_is_no_recording_says_why(server: str, kept: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "notes.txt"
    nothing.write_text("hello")
    refused = sent(server, [nothing], query="<b>kind: training")
    assert (
        refused.status_code == 422
        and "This cannot be answered" in refused.text
        and "<b>kind" not in refused.text
    )
    refused = sent(server, [nothing])
    assert (
        refused.status_code == 422
        and "notes.txt" in refused.text
        and "hp-explain" not in refused.text
    )
    assert httpx.post(f"{server}/explain", data={"trace": "x"}, timeout=60).status_code == 422
    assert not list(kept.iterdir())
