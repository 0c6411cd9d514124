"""The README's promise, kept on this machine: real torchrun runs that differ where it matters."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from hp_tool.queries import schema
from hp_tool.store import open_store
from hp_tool.tuning import study_storage, tune
from tests.conftest import skip_or_fail

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.mark.distributed
@pytest.mark.slow
def test_four_real_runs_differ_in_every_axis_and_end_in_a_measured_best(tmp_path, monkeypatch):
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="torch and megatron-core are not installed")
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    query = schema.parse_query(QUICKSTART.read_text())
    query = replace(query, search=replace(query.search, budget_runs=4, steps=2))
    store = open_store(url)
    result = tune(query=query, store=store, storage=study_storage(url))
    runs = store.runs(search_id=result.search.id)
    store.close()
    measured = [run for run in runs if run.measurement.status == "ok"]
    assert len(measured) == result.search.profile_runs == 4
    for run in measured:
        assert run.measurement.hardware.gpu == "cpu"
        assert run.measurement.losses[-1] < run.measurement.losses[0]
        assert run.measurement.versions["megatron-core"]
    for axis in ("tensor_parallel_size", "pipeline_parallel_size", "sequence_parallel", "recompute"):
        assert len({getattr(run.parallel, axis) for run in measured}) > 1, axis
    best = result.recommendations[0]
    assert best.measurement is not None
    assert best.calibrated_estimate is not None
