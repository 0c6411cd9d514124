"""A whole search over someone's own training script: real torchrun jobs of the local launcher, read
from their logs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from hp_tool.catalog import library
from hp_tool.errors import InputError
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from hp_tool.store import open_store
from tests.conftest import skip_or_fail

TRAINER = Path(__file__).with_name("tiny_trainer.py")
BRIDGE = Path(__file__).with_name("bridge_like.py")


def query(*more: str, **changes: object):
    command = [str(TRAINER), "{flags:megatron-lm}", "--train-iters", "{train_iters}", *more]
    return schema.parse_query(
        {
            "kind": "training",
            "model": {
                "name": "tiny",
                "num_hidden_layers": 4,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "vocab_size": 1024,
            },
            "cluster": {"gpu": "cpu", "num_gpus": 2, "gpus_per_node": 2},
            "training": {"sequence_length": 64, "global_batch_size": 16, "precision": "bf16"},
            "parallel": {
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "micro_batch_size": [1, 4, 8],
                "recompute": "none",
            },
            "search": {"budget_runs": 3, "steps": 3, "warmup_steps": 1, "min_gain_fraction": 0.0},
            "trainer": {"command": command, "reader": "megatron-lm"},
            **changes,
        }
    )


@pytest.mark.long
@pytest.mark.components
def test_a_search_over_a_command_ends_in_a_measured_best(tmp_path, monkeypatch):
    if importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="torch is not installed")
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    try:
        result = tune(query=query("--out-of-memory-from", "8"), store=store)
        runs = store.runs(search_id=result.search.id)
        record = store.measurements(search_id=result.search.id).items[0]
    finally:
        store.close()
    by_size = {run.parallel.micro_batch_size: run.measurement for run in runs}
    assert {size: found.status for size, found in by_size.items()} == {1: "ok", 4: "ok", 8: "oom"}
    for size in (1, 4):
        assert len(by_size[size].step_times_s) == 3 and len(by_size[size].losses) == 4
        assert by_size[size].hardware.gpu == "cpu"
    assert "out of memory" in by_size[8].cause
    best = result.recommendations[0]
    assert best.measurement is not None and best.measurement.step_s == min(
        by_size[1].step_s, by_size[4].step_s
    )
    assert record.cluster_key.endswith(
        "/tiny_trainer.py"
    )  # kept apart from what the profiler measures


@pytest.mark.long
@pytest.mark.components
def test_a_launch_line_of_megatron_bridge_is_tuned_end_to_end(tmp_path, monkeypatch):
    """A registered trainer, run by its name, that follows fewer layers and micro-batches; a whole
    run proves the best.
    """
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(component="MEGATRON", reason="torch and megatron-core are not installed")
    words = [
        "--model_family_name",
        "gpt",
        "--model_recipe_name",
        "tiny",
        "--gpu",
        "cpu",
        "--compute_dtype",
        "fp32",
    ]
    command = [
        str(BRIDGE),
        *words,
        "--num_gpus",
        "{num_gpus}",
        "{flags:megatron-bridge}",
        "train.train_iters={train_iters}",
    ]
    registered = {
        "command": command,
        "reader": "megatron-bridge",
        "reducible": ["layers", "micro_batches"],
    }
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "bridge.yaml").write_text(yaml.safe_dump(registered))
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    library.clear_cache()
    axes = {
        "tensor_parallel_size": [1, 2],
        "pipeline_parallel_size": 1,
        "micro_batch_size": 1,
        "recompute": "none",
    }
    search = {"budget_runs": 3, "steps": 3, "warmup_steps": 1, "min_gain_fraction": 0.0}
    training = {"sequence_length": 64, "global_batch_size": 64, "precision": "bf16"}
    # The recipe brings the shape: a larger one here makes whole runs look long enough to be worth
    # reducing.
    model = {
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 1024,
    }
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    try:
        result = tune(
            query=query(
                trainer="bridge", model=model, parallel=axes, search=search, training=training
            ),
            store=store,
        )
        runs = store.runs(search_id=result.search.id)
        clusters = {
            each.cluster_key for each in store.measurements(search_id=result.search.id).items
        }
    finally:
        store.close()
        library.clear_cache()
    assert [run.measurement.status for run in runs] == ["ok"] * 3, [
        run.measurement.cause for run in runs
    ]
    assert {run.parallel.tensor_parallel_size for run in runs} == {1, 2}
    first, *others = runs
    assert (
        first.fidelity.num_micro_batches == 2
    )  # of 64: fewer were trained, and stand for all of them
    assert first.measurement.step_s < first.measurement.extrapolated_step_s
    whole = next(run for run in others if run.fidelity.is_whole)
    assert len(whole.measurement.step_times_s) == 3 and len(whole.measurement.losses) == 4
    best = result.recommendations[0]
    assert best.measurement.fidelity.is_whole and all(
        key.endswith("/bridge_like.py") for key in clusters
    )


def test_a_command_that_says_too_little_ends_the_search_with_the_mend(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    asked = query(
        trainer={"command": ["train.py", "--tp={tensor_parallel_size}"], "reader": "json"}
    )
    try:
        with pytest.raises(InputError, match=r"differ in micro_batch_size"):
            tune(query=asked, store=store)
    finally:
        store.close()
