"""The explorers follow one's own files: a model that is changed while the service runs is ranked
anew, not only drawn anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from hp_tool.catalog import library
from tests.service.test_calibration_pages import metrics

TINY = {"num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 32000}
TRAINING = {
    "model": "house",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": 8,
    "training.sequence_length": 4096,
    "training.global_batch_size": 64,
}
SERVING = {
    "kind": "inference",
    "model": "house",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": 1,
    "inference.input_length": 1000,
    "inference.output_length": 200,
    "inference.concurrency": 8,
}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model of one's own."""
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path / "own"))
    path = tmp_path / "own" / "models" / "house.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(TINY))
    library.clear_cache()
    yield path
    library.clear_cache()


def test_a_changed_model_is_ranked_anew(house: Path, http: TestClient) -> None:
    steps = []
    for layers in (8, 16):
        house.write_text(json.dumps(TINY | {"num_hidden_layers": layers}))
        page = http.get("/explorer.json", params=TRAINING).json()
        chosen = next(row for row in page["rows"] if row["chosen"])
        assert chosen["step_s"] == pytest.approx(metrics(page["view"])["Step time"]["value"]), (
            f"{layers} layers"
        )
        steps.append(chosen["step_s"])
    assert steps[1] > 1.5 * steps[0]


def test_a_changed_model_is_served_anew(house: Path, http: TestClient) -> None:
    paces = []
    for layers in (8, 16):
        house.write_text(json.dumps(TINY | {"num_hidden_layers": layers}))
        page = http.get("/explorer.json", params=SERVING).json()
        paces.append(next(row for row in page["rows"] if row["chosen"])["tpot_s"])
    assert paces[1] > 1.3 * paces[0]
