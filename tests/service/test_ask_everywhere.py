"""A question has one answer: its heading, its first row, the row's link, the JSON, the API and the
command line, reached by typing, a slider, Back and a link.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from fastapi.testclient import TestClient

from service.dashboard.page import address
from tests.command_line import hp_tool
from tests.service.conftest import checked_page
from tests.service.every_page import RENT
from tests.service.test_one_configuration import figures, query_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SIZES = (8, 16, 64, 256)
MODELS = ("llama-3-8b", "llama-3-70b", "qwen3-32b")
QUICK = {("llama-3-8b", 8), ("llama-3-70b", 16)}
"""Cases of the default tests."""
CASES = [
    (model, size) if (model, size) in QUICK else pytest.param(model, size, marks=pytest.mark.long)
    for model in MODELS
    for size in SIZES
]
USUAL = ("mixtral-8x7b", "gpt3-175b", "xglm-564m")
"""Models whose estimates take usual settings: today's recipe, or CUDA graphs if launches limit a
step.
"""
CASES += [
    pytest.param(model, 64, marks=() if model == "mixtral-8x7b" else pytest.mark.long)
    for model in USUAL
]


class Form(HTMLParser):
    """The fields that a browser without scripts sends of a page's form."""

    def __init__(self, page: str, part: str) -> None:
        super().__init__()
        self.part, self.fields, self.select, self.inside = part, [], "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            self.inside = given.get("data-part") == self.part
        if not self.inside:
            return
        name = given.get("name") or ""
        if tag == "input" and (given.get("type") != "checkbox" or "checked" in given):
            self.fields.append((name, given.get("value") or ""))
        if tag == "select":
            self.select, self.first = name, True
        if tag in ("select", "textarea"):
            self.fields.append((name, ""))
        if tag == "option" and self.select and (self.first or "selected" in given):
            self.fields[-1] = (self.select, given.get("value") or "")
            self.first = False

    def handle_data(self, data: str) -> None:
        """Read an option without a value attribute, or a text area: its text is its value."""
        if self.inside and self.lasttag == "textarea" and self.fields[-1][1] == "":
            self.fields[-1] = (self.fields[-1][0], data.strip())
        if self.select and self.fields[-1] == (self.select, "") and self.lasttag == "option":
            raw = self.get_starttag_text() or ""
            if "value" not in raw and "selected" in raw:
                self.fields[-1] = (self.select, data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "select":
            self.select = ""
        if tag == "form":
            self.inside = False

    def sent(self, **changed: str) -> str:
        """Return the address after these fields changed."""
        assert changed.keys() <= {name for name, _ in self.fields}
        fields = [(name, changed.get(name, value)) for name, value in self.fields]
        return f"/explorer?{urlencode(fields)}"


def twin(http: TestClient, href: str) -> dict[str, Any]:
    page: dict[str, Any] = http.get(href.replace("?", ".json?", 1)).json()
    assert page["error"] is None, page["error"]
    return page


def asked(model: str, num_gpus: int) -> str:
    query = query_of(model, num_gpus)
    parts = {
        f"{name}.{key}": value
        for name in ("cluster", "training")
        for key, value in query[name].items()
    }
    return address("/explorer", {"model": model} | parts)


@pytest.mark.parametrize(("model", "num_gpus"), CASES)
def test_one_answer_however_it_is_reached(
    shared_http: TestClient, model: str, num_gpus: int
) -> None:
    href = asked(model, num_gpus)
    page, html = twin(shared_http, href), shared_http.get(href).text
    answer = shared_http.post("/v1/recommendations", json=query_of(model, num_gpus)).json()
    best = (answer.get("recommendations") or answer["nearest_misses"])[0]
    known = best["estimate"]
    once = pytest.approx((known["time"]["step_s"], known["memory"]["total_bytes"]), rel=1e-9)
    first = page["rows"][0]
    assert first["chosen"] and page["view"]["heading"] == first["arithmetic"]
    assert first["parallel"] == best["parallel"]
    assert figures(page["view"]) == (first["step_s"], first["memory_bytes"]) == once
    listed = [(row["arithmetic"], row["details"], row["step_s"]) for row in page["rows"]]
    for row in page["rows"]:  # a link is its row, and leaves the question as it is
        there = twin(shared_http, row["settings_href"])
        assert (there["view"]["heading"], there["view"]["details"]) == (
            row["arithmetic"],
            row["details"],
        )
        assert figures(there["view"]) == pytest.approx((row["step_s"], row["memory_bytes"]))
        assert [each["chosen"] for each in there["rows"]] == [each is row for each in page["rows"]]
        assert there["values"] == page["values"]
        assert [(r["arithmetic"], r["details"], r["step_s"]) for r in there["rows"]] == listed
        # Typing the same question again leads from any row to the best one.
        opened = shared_http.get(row["settings_href"]).text
        again = twin(shared_http, Form(opened, "question").sent())
        assert again["view"]["heading"] == page["view"]["heading"]
        assert again["values"] == page["values"] and figures(again["view"]) == once
    still = twin(shared_http, Form(html, "layout").sent())  # a slider that is put back
    assert still["rows"][0]["chosen"] and figures(still["view"]) == once
    micro_batch = "at.parallel.micro_batch_size"
    other = "2" if page["at"][micro_batch.removeprefix("at.")] == "1" else "1"
    moved = twin(shared_http, Form(html, "layout").sent(**{micro_batch: other}))
    assert moved["view"]["heading"].startswith(page["view"]["heading"].partition(" x DP")[0])
    assert [(r["arithmetic"], r["details"], r["step_s"]) for r in moved["rows"]] == listed
    doubled = Form(shared_http.get(moved["json_href"].replace(".json", "", 1)).text, "question")
    more = twin(shared_http, doubled.sent(**{"cluster.num_gpus": str(2 * num_gpus)}))
    fresh = twin(shared_http, asked(model, 2 * num_gpus))
    assert more["at"] == fresh["at"] and figures(more["view"]) == figures(fresh["view"])


@pytest.mark.parametrize(
    "href",
    [
        "/explorer?kind=inference&training.gradient_precision=bf16",
        "/explorer?cluster=dgx-h100&model=llama-3-8b",
        "/explorer?cluster.node_type=dgx-h100&cluster.num_gpus=16&training.optimizer=muon",
        address("/explorer", RENT | {"cluster.market": "reserved"}),
    ],
)
def test_a_form_that_is_sent_as_it_is_asks_the_same(shared_http: TestClient, href: str) -> None:
    form = Form(shared_http.get(href).text, "question")
    page = twin(shared_http, href)
    again = twin(shared_http, form.sent())
    assert (again["values"], again["several"]) == (page["values"], page["several"])
    assert again["view"] == page["view"]


@pytest.mark.parametrize("num_gpus", [8, pytest.param(64, marks=pytest.mark.long)])
def test_the_command_line_has_the_same_answer(
    shared_http: TestClient, tmp_path: Path, num_gpus: int
) -> None:
    (tmp_path / "query.json").write_text(json.dumps(query_of("llama-3-8b", num_gpus)))
    done = hp_tool("recommend", str(tmp_path / "query.json"), "--json")
    best = json.loads(done.stdout)["recommendations"][0]
    page = twin(shared_http, asked("llama-3-8b", num_gpus))
    assert page["rows"][0]["parallel"] == best["parallel"]
    known = best["estimate"]
    assert figures(page["view"]) == pytest.approx(
        (known["time"]["step_s"], known["memory"]["total_bytes"]), rel=1e-9
    )


def test_one_answer_in_a_browser(browser: Browser, server: str, shared_http: TestClient) -> None:
    with checked_page(browser) as page:

        def shown() -> dict[str, Any]:
            page.locator(".findings:not([aria-busy=true])").wait_for()
            there = twin(shared_http, f"/explorer?{urlsplit(page.url).query}")
            heading = page.locator("[data-part=verdict] h2").inner_text()
            assert heading == there["view"]["heading"]
            return there

        page.goto(f"{server}{asked('llama-3-8b', 8)}")
        typed = shown()
        page.get_by_label("Number of GPUs").fill("16")
        page.wait_for_url("**cluster.num_gpus=16**")
        wider = shown()
        assert wider["at"] == twin(shared_http, asked("llama-3-8b", 16))["at"]
        page.get_by_role("slider", name="Micro-batch").press("End")
        page.wait_for_url("**at.parallel.micro_batch_size=16**")
        assert shown()["at"]["parallel.micro_batch_size"] == "16"
        page.go_back()
        page.wait_for_function("!location.search.includes('at.')")
        assert shown()["at"] == wider["at"]
        slider = page.get_by_label("Micro-batch", exact=True).and_(page.locator("select"))
        assert slider.input_value() == wider["at"]["parallel.micro_batch_size"]
        page.go_back()
        page.wait_for_url("**cluster.num_gpus=8**")
        assert shown()["at"] == typed["at"]
        assert page.get_by_label("Number of GPUs").input_value() == "8"
        row = typed["rows"][1]
        page.locator("[data-part=best] tbody a").nth(1).click()
        page.wait_for_url("**at.parallel**")
        assert shown()["view"]["heading"] == row["arithmetic"]
        assert parse_qs(urlsplit(page.url).query) == parse_qs(urlsplit(row["settings_href"]).query)
