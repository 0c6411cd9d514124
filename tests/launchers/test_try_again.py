"""Searches over a Ray head that answers "try again later" for a while: it is waited for, and no
configuration is blamed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hp_tool.cluster.launchers import create
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from hp_tool.store import open_store
from tests.conftest import skip_or_fail
from tests.launchers.ray_stand_in import RayHead, ray_head

QUERY = {
    "kind": "training",
    "model": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
    "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
    "parallel": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "zero_stage": [0, 1],
        "recompute": "none",
    },
    "search": {"launcher": "ray", "budget_runs": 1, "fidelity": "full"},
}
RESULT = {"status": "ok", "step_s": 0.5, "step_times_s": [0.5, 0.5], "losses": [2.0, 1.0]}
OPTIONS = {"gpu": "cpu", "gpus_per_node": 2, "poll_s": 0.1}


@pytest.mark.components
@pytest.mark.parametrize("what", ["submit", "logs"])
def test_a_head_without_agents_is_waited_for(what: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        skip_or_fail(component="RAY", reason="ray is not installed")
    told = []
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    with ray_head(RayHead(result=RESULT, refusals={what: 3})) as head:
        launcher = create("ray", options={**OPTIONS, "address": head.address})
        result = tune(
            query=schema.parse_query(QUERY),
            store=store,
            launcher=launcher,
            on_event=lambda kind, payload: told.append((kind, payload)),
        )
        runs = store.runs(search_id=result.search.id)
    store.close()
    assert head.refusals == {what: 0}
    assert [(run.attempt, run.measurement.status) for run in runs if run.measurement] == [
        (0, "ok")
    ] and len(runs) == 1
    waits = [payload["waiting_for"] for kind, payload in told if kind == "waiting"]
    assert len(waits) == 1 and "try again later" in waits[0]
