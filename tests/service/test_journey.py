"""From the form to the answer in a real browser, against a real server and a real worker."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hp_tool.store import schema
from tests.conftest import skip_or_fail
from tests.service.conftest import checked_page
from tests.service.processes import api, free_port, process, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.distributed
PATIENCE_MS = 240_000
MODEL = """model: {name: gpt-tiny, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 512}
search: {steps: 2, warmup_steps: 1}
training: {precision: fp32}"""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.long])])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="the profiler extra is not installed")
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    url: str = request.getfixturevalue("postgres_url")
    schema.upgrade(url)
    return url


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """The server's absence, which the console reports, is part of the journey."""
    with checked_page(browser, console=()) as opened:
        opened.set_default_timeout(PATIENCE_MS)
        yield opened


def test_a_search_from_the_form_to_its_export(page: Page, database_url: str, tmp_path: Path) -> None:
    port = free_port()
    with api(database_url=database_url, home=tmp_path, port=port) as url:
        page.goto(f"{url}/searches/new")
        for label, value in (
            ("GPU", "cpu"),
            ("GPUs", "0"),
            ("GPUs per node", "2"),
            ("Sequence length", "64"),
            ("Global batch size", "4"),
        ):
            page.get_by_label(label, exact=True).fill(value)
        page.get_by_text("Other fields").click()
        page.get_by_label("Further fields of the query, as YAML").fill(MODEL)
        page.locator("[data-error='cluster.num_gpus']", has_text="got 0").wait_for()
        page.get_by_label("GPUs", exact=True).fill("2")
        page.get_by_role("heading", name="Best configurations").wait_for()
        page.get_by_text("Profile runs", exact=True).click()
        page.get_by_label("Maximum profile runs").fill("2")
        page.get_by_role("button", name="Start the search").click()
        page.locator("h1 + .state", has_text="queued").wait_for()
        search = page.url
    # Nobody answers now; the page says so, and comes back by itself.
    page.get_by_text("The server is unreachable").wait_for()
    with api(database_url=database_url, home=tmp_path, port=port), process("worker", database_url=database_url, home=tmp_path):
        page.locator("h1 + .state", has_text="succeeded").wait_for()
        assert page.url == search
        wait_for(lambda: page.locator("#connection").inner_text() == "", timeout_s=30)
        page.locator("tr.chosen").wait_for()
        best = page.locator(".arithmetic").inner_text()
        assert best.endswith("= 2 GPUs")
        assert page.locator("tr.chosen a").inner_text() == best
        assert page.locator("tbody[data-part=rows] > tr").count() == 2
        page.get_by_role("button", name="Show").click()
        page.locator("#exported", has_text="--tensor-model-parallel-size").wait_for()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download").click()
        assert "--tensor-model-parallel-size" in Path(download.value.path()).read_text()
        for box in page.locator("tbody[data-part=rows]").get_by_role("checkbox").all():
            box.check()
        page.get_by_role("link", name="Compare the two").click()
        page.wait_for_url("**/compare?**")
        assert page.locator("h1").inner_text()
