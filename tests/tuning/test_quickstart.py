"""The README's promise, kept on this machine: real torchrun runs that differ where it matters."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hp_tool.loop.tuning import study_storage, tune
from hp_tool.questions import schema
from hp_tool.store import open_store
from tests.conftest import skip_or_fail

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


EXPERTS = """
kind: training
model: {name: gpt-experts, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, intermediate_size: 128,
  vocab_size: 256, gated_mlp: true, normalization: rmsnorm, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 64}
cluster: {gpu: cpu, num_gpus: 2, gpus_per_node: 2}
training: {sequence_length: 64, global_batch_size: 4, precision: fp32}
parallel: {tensor_parallel_size: 1, pipeline_parallel_size: 1, expert_parallel_size: 2, expert_tensor_parallel_size: 1,
  micro_batch_size: 2, recompute: none, zero_stage: 1, moe_token_dispatcher_type: [alltoall, allgather]}
search: {launcher: local, budget_runs: 2, run_timeout_s: 1200, steps: 2, warmup_steps: 1}
"""  # noqa: E501


@pytest.mark.components
@pytest.mark.long
def test_experts_on_two_processes_train_the_same_by_each_dispatcher(tmp_path, monkeypatch):
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="torch and megatron-core are not installed")
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    store = open_store(url)
    result = tune(query=schema.parse_query(EXPERTS), store=store, storage=study_storage(url))
    runs = store.runs(search_id=result.search.id)
    store.close()
    losses = {run.parallel.moe_token_dispatcher_type: run.measurement.losses for run in runs}
    assert {run.parallel.expert_parallel_size for run in runs} == {2}
    for one, other in zip(
        losses["alltoall"], losses["allgather"], strict=False
    ):  # a run may warm up longer
        assert one == pytest.approx(other, rel=1e-5)
    assert {row.parallel.moe_token_dispatcher_type for row in result.recommendations} == set(losses)


@pytest.mark.components
def test_four_real_runs_differ_in_every_axis_and_end_in_a_calibrated_best(tmp_path, monkeypatch):
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="torch and megatron-core are not installed")
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    query = schema.parse_query(QUICKSTART.read_text())
    query = replace(  # fewer and shorter runs than a user's first search
        query,
        search=replace(
            query.search,
            budget_runs=4,
            budget_gpu_seconds=36000,
            run_timeout_s=1200.0,
            steps=2,
            baseline=None,
        ),
    )
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
    for axis in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "sequence_parallel",
        "recompute",
    ):
        assert len({getattr(run.parallel, axis) for run in measured}) > 1, axis
    best = result.recommendations[0]
    assert best.calibrated_estimate is not None and best.calibrated_estimate.time is not None
    if best.measurement is None:  # a busy host's runs scatter: one that did not run may look faster
        kinds = [(run.measurement.extrapolated_step_s, run.measurement.step_s) for run in measured]
        ran = min(whole or part or 0.0 for whole, part in kinds)
        assert best.calibrated_estimate.time.step_s < ran


def test_the_dashboard_offers_the_search_of_the_example() -> None:
    presets = pytest.importorskip("service.dashboard.presets")
    assert yaml.safe_load(QUICKSTART.read_text()) == presets.QUICKSTART
