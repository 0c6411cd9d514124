"""The first minutes with an empty service: steps, presets that answer, and a finished search to
look at.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import yaml
from fastapi.testclient import TestClient
from markupsafe import escape

from hp_tool.domain.access import Scope
from hp_tool.store import SqlStore
from service.app import create_app
from service.dashboard.new_search_form import to_query
from service.dashboard.presets import QUICKSTART, QUICKSTART_HREF
from service.settings import Settings
from tests.service.test_access import OPERATOR, key


def test_an_empty_service_teaches_in_three_steps(http: TestClient) -> None:
    assert (
        "Your first search" in http.get("/").text
        and http.get("/searches/sample").status_code == 200
    )
    page = http.get("/searches").text
    assert page.count("<li>") == 3 and "/searches/sample" in page and "hp-tool worker" in page
    assert escape(QUICKSTART_HREF) in page


def test_the_example_can_be_started_and_asked(http: TestClient) -> None:
    page = http.get(QUICKSTART_HREF.replace("?", ".json?", 1)).json()
    assert to_query(page["values"]) == QUICKSTART
    assert page["error"] is None and page["best"] and page["unsearchable"] is None
    asked = http.get(page["question_href"].replace("?", ".json?", 1)).json()
    assert asked["view"]["heading"] == page["best"]["arithmetic"], "its model is in the YAML"
    answer = http.post("/searches/new", data=page["values"], follow_redirects=False)
    assert answer.status_code == 303
    search = answer.headers["location"]
    assert "hp-tool worker" in http.get(search).text


def test_this_machine_is_the_quickstart() -> None:
    example = yaml.safe_load(
        (Path(__file__).parents[2] / "examples" / "quickstart.yaml").read_text()
    )
    assert example == QUICKSTART


def test_everybody_may_look_at_the_sample_and_nobody_may_change_it(store: SqlStore) -> None:
    with TestClient(
        create_app(Settings(api_key=OPERATOR), store=store), base_url="http://127.0.0.1:8000"
    ) as http:
        reader, admin = key(store, Scope.READ), {"Authorization": f"Bearer {OPERATOR}"}
        for headers in (reader, admin):
            page = http.get("/searches/sample.json", headers=headers).json()
            assert page["state"] == "succeeded" and page["profile_runs"] == 9
            best = page["best"]
            assert (best["verdict"], best["num_verdict"], best["title"]) == (
                "use",
                1,
                "Use this configuration",
            )
            (said,) = best["sentences"][: best["num_verdict"]]
            assert "per step" in said and "times your baseline's speed" in said
            assert best["gain"]["interval"][0] > 1.5, "clear to anybody"
            trials = http.get("/searches/sample/trials.json", headers=headers).json()
            assert sum(each is not None for each in trials["measured_step_s"]) == 9
            assert http.get("/searches/sample", headers=headers).status_code == 200
            assert (
                http.get("/searches/sample/export?format=nanotron", headers=headers).status_code
                == 200
            )
            assert http.get("/v1/searches/sample/trials", headers=headers).status_code == 200
        for action in ("cancel", "pause", "resume"):
            assert http.post(f"/v1/searches/sample/{action}", headers=admin).status_code in (
                404,
                409,
            )
        submitter = key(store, Scope.SUBMIT)
        assert http.put(
            "/v1/searches/sample/label", json={"name": "mine"}, headers=submitter
        ).status_code in (404, 409)
        assert (
            http.get("/searches/sample.json", headers=reader)
            .json()["label"]["name"]
            .startswith("Sample")
        )
        again = http.post("/v1/searches/sample/clone", headers=submitter)
        assert (again.status_code, again.json()["field"]) == (422, "training.framework"), (
            "its runs are published ones"
        )
        text = http.get("/searches/sample", headers=submitter).text
        assert "/searches/sample/clone" not in text
        (start,) = re.findall(r'href="([^"]+)">Start a search', text)
        assert "gpt-quickstart" in http.get(html.unescape(start), headers=submitter).text
        assert http.get("/v1/measurements", headers=admin).json()["items"] == []
