"""Every list of configurations, machines, runs and searches is also a CSV file."""

from __future__ import annotations

import csv
import io
import re
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.ports import Store
from hp_tool.wording.figures import Figure
from hp_tool.wording.rankings import Column, Table
from service.dashboard.page import address
from service.dashboard.report import report_html
from tests.service.coordinator import claim, one_run
from tests.service.every_page import DONE, OTHER, RENT


def rows_at(http: TestClient, href: str) -> list[dict[str, str]]:
    answer = http.get(href)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(answer.text)))


@pytest.mark.parametrize(
    ("page", "listed", "figures"),
    [
        ("/explorer?kind=training", "rows", ("step_s", "mfu", "tokens_per_second_per_gpu")),
        ("/explorer?kind=inference", "rows", ("ttft_s", "tpot_s", "tokens_per_second_per_gpu")),
    ],
)
def test_a_ranking_s_file_has_the_figures_of_its_page(
    http: TestClient, page: str, listed: str, figures: tuple[str, ...]
) -> None:
    shown: dict[str, Any] = http.get(page.replace("?", ".json?")).json()
    assert 'href="/explorer.csv?' in http.get(page).text
    rows = rows_at(http, page.replace("?", ".csv?"))
    rate = "tokens_per_second_per_gpu"
    names = {rate: f"output_{rate}"} if "inference" in page else {}
    assert len(rows) == len(shown[listed]) > 1
    for row, known in zip(rows, shown[listed], strict=True):
        assert row["configuration"] == known["arithmetic"]
        assert [float(row[names.get(name, name)]) for name in figures] == [
            known[name] for name in figures
        ]


def test_machines_have_their_costs_with_intervals(http: TestClient) -> None:
    href = address("/explorer", RENT)
    shown = http.get(href.replace("?", ".json?")).json()["machines"]["rows"]
    rows = rows_at(http, href.replace("?", ".csv?"))
    assert [float(row["cost"]) for row in rows] == [each["cost"] for each in shown]
    for row in rows:
        assert float(row["cost_low"]) < float(row["cost"]) < float(row["cost_high"])


def test_runs_and_searches_have_files(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    one_run(store, claim(store, search), DONE)
    (run,) = rows_at(http, f"/searches/{search}/runs.csv")
    assert (run["run"], run["state"], float(run["measured_s"])) == ("1", "ok", DONE.step_s)
    assert [row["href"] for row in rows_at(http, "/searches.csv")] == [f"/searches/{search}"]


def test_the_file_of_runs_has_the_settings_in_which_they_differ(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    """On the server, and within a report, which has no server to ask."""
    search = http.post("/v1/searches", json=query).json()["id"]
    lease = claim(store, search)
    one_run(store, lease, DONE)
    one_run(store, lease, DONE, OTHER)
    rows = rows_at(http, f"/searches/{search}/runs.csv")
    assert {row["tensor_parallel_size"] for row in rows} == {"1", "2"}
    report = report_html(store=store, search_id=search)
    (inside,) = re.findall(r'href="data:text/csv;charset=utf-8,([^"]*)"', report)
    assert unquote(inside) == http.get(f"/searches/{search}/runs.csv").text


def test_a_text_is_no_formula_of_a_spreadsheet() -> None:
    column = Column(figure=Figure(name="name", label="Name", unit="text"))
    table = Table(columns=(column,), rows=[{"name": "=1+1"}, {"name": 'a,"b"'}])
    assert table.csv().splitlines() == ["name", "'=1+1", '"a,""b"""']


def test_a_column_of_no_attribute_is_an_error() -> None:
    """A misspelt place fails, instead of leaving every cell empty."""
    column = Column(figure=Figure(name="ttft_seconds", label="TTFT", unit="seconds"))
    with pytest.raises(AttributeError, match="ttft_seconds"):
        Table(columns=(column,), rows=[DONE]).csv()
