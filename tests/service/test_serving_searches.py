"""A search for a way to serve, as the API and the dashboard show it."""

from __future__ import annotations

from fastapi.testclient import TestClient

from hp_tool.store import open_store
from hp_tool.tuning import tune
from service.app import create_app
from service.settings import Settings
from tests.tuning.serving_engine import ServingEngine
from tests.tuning.test_serving_search import query


def test_its_pages_and_trials_are_served(tmp_path):
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    store = open_store(url)
    found = tune(query=query(search={"budget_runs": 2}), store=store, launcher=ServingEngine(num_gpus=2))
    store.close()
    with TestClient(create_app(Settings(database_url=url)), base_url="http://127.0.0.1:8000") as client:
        trials = client.get(f"/v1/searches/{found.search.id}/trials").json()["trials"]
        assert len(trials) == 2 and all(trial["calibrated"]["step_s"] > 0 for trial in trials)
        best = client.get(f"/v1/searches/{found.search.id}/result").json()["recommendations"][0]
        assert best["measurement"]["serving"]["tpot_s"] > 0
        columns = client.get(f"/searches/{found.search.id}/trials.json").json()
        assert len(columns["arithmetic"]) == 2 and columns["best"] is not None
        for page in (f"/searches/{found.search.id}", "/measurements", "/calibration"):
            assert client.get(page).status_code == 200, page
