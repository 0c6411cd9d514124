"""Registered clusters: where runs go, with which options, and how much of the cluster they may
take.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool import catalog
from hp_tool.catalog import library
from hp_tool.catalog.hardware import cluster_runs
from hp_tool.cluster.launchers.local import LocalLauncher
from hp_tool.cluster.launchers.ray_jobs import RayLauncher
from hp_tool.cluster.launchers.slurm import SlurmLauncher
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import TrainerCommand
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, LimitError
from hp_tool.loop.tuning import create_launcher, tune, within_limits
from hp_tool.loop.tuning.clusters import launcher_name
from hp_tool.loop.tuning.plan import bill, plan_search
from hp_tool.questions import schema
from hp_tool.questions.registered import checked_registration
from hp_tool.store import open_store
from tests.torch_or_skip import profiler_extra_or_skip
from tests.tuning.cpu_engine import CpuEngine

NODE = {"gpus_per_node": 2, "inter_node_bandwidth_bytes_per_second": 1e9, "fabric": "ethernet"}
CLUSTERS: dict[str, dict[str, Any]] = {
    "two-nodes": {
        "gpu": "h100-sxm-80gb",
        **NODE,
        "gpus_per_node": 8,
        "num_gpus": 16,
        "runs": {"launcher": "slurm", "options": {"partition": "gpu"}, "max_concurrent_runs": 2},
    },
    "by-ray": {
        "gpu": "cpu",
        **NODE,
        "num_gpus": 4,
        "runs": {"launcher": "ray", "options": {"address": "http://head:8265"}},
    },
    "bounded": {
        "gpu": "cpu",
        **NODE,
        "num_gpus": 2,
        "runs": {
            "launcher": "local",
            "max_gpu_seconds_per_search": 300.0,
            "max_gpu_seconds_per_day": 400.0,
        },
    },
    "busy": {"gpu": "cpu", **NODE, "num_gpus": 2, "runs": {"launcher": "local"}},
    "by-kubernetes": {
        "gpu": "cpu",
        **NODE,
        "gpus_per_node": 1,
        "num_gpus": 2,
        "runs": {"launcher": "kubernetes", "options": {"image": "registry.example/hp-tool:1"}},
    },
    "silent": {"gpu": "cpu", **NODE, "num_gpus": 2},
}


@pytest.fixture(autouse=True)
def own_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "catalogue" / "clusters"
    folder.mkdir(parents=True)
    for name, entry in CLUSTERS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(entry))
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path / "catalogue"))
    library.clear_cache()
    yield folder
    library.clear_cache()


@pytest.fixture
def store(tmp_path: Path):
    opened = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    yield opened
    opened.close()


def query(cluster: Any, **search: Any):
    return schema.parse_query(
        {
            "kind": "training",
            "model": {
                "num_hidden_layers": 4,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "vocab_size": 1024,
            },
            "cluster": cluster,
            "training": {"sequence_length": 64, "global_batch_size": 16},
            "search": {"budget_runs": 2, **search},
        }
    )


def test_a_query_that_names_a_cluster_runs_on_its_launcher_with_its_options() -> None:
    launcher = create_launcher(query("two-nodes"))
    assert isinstance(launcher, SlurmLauncher)
    assert (launcher.hardware().gpu, launcher.hardware().num_gpus) == ("h100-sxm-80gb", 16)
    assert launcher.hardware().hosts == ("two-nodes",)
    part = query({"node_type": "two-nodes", "num_gpus": 8})
    assert create_launcher(part).hardware().num_gpus == 16  # what one job can have
    assert isinstance(create_launcher(query("by-ray")), RayLauncher)


def test_a_plan_is_shown_and_nothing_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    big = {"sequence_length": 1024, "global_batch_size": 16}
    script = plan_search(replace(query("two-nodes"), training=TrainingWorkload(**big))).job
    assert script is not None
    assert (
        script.startswith("#!/bin/bash")
        and "#SBATCH --partition=gpu" in script
        and "torch.distributed.run" in script
    )
    trainer = TrainerCommand(command=("train.py", "{flags:megatron-lm}"), reader="json")
    local = plan_search(replace(query("silent"), trainer=trainer)).job or ""
    assert "train.py" in local and "--micro-batch-size" in local and len(local) < 5_000, (
        "its command, without its files"
    )
    pods = json.loads(plan_search(query("by-kubernetes")).job or "")
    assert pods["items"][-1]["spec"]["completions"] == 2
    assert not (tmp_path / "runs").exists()


def test_a_plan_is_the_bill_of_the_whole_search(store) -> None:
    dear = {"node_type": "dgx-h100", "num_gpus": 256, "price_per_gpu_hour": 3.6}
    asked = schema.parse_query(
        {
            "kind": "training",
            "model": "llama-3-70b",
            "cluster": dear,
            "training": {"sequence_length": 8192, "global_batch_size": 512},
            "search": {"launcher": "slurm"},
        }
    )
    plan = bill(asked, store=store).plan
    first, proof = plan.first, plan.confirmation
    assert 0.5 < first.hold_probability <= 1.0
    assert proof is not None and not first.fidelity.is_whole and proof.fidelity.is_whole
    assert (first.num_gpus, first.num_nodes, proof.num_gpus, proof.num_nodes) == (64, 8, 256, 32)
    assert (
        first.wall_s == pytest.approx(180.0 + 7 * first.step_s)
        and proof.wall_s < proof.time_limit_s
    )
    assert (plan.runs, plan.stopped_by) == (8, "budget_runs")
    assert plan.gpu_seconds == pytest.approx(7 * first.num_gpus * first.wall_s + 256 * proof.wall_s)
    assert plan.cost == pytest.approx(plan.gpu_seconds / 1000.0) and plan.wall_s == pytest.approx(
        7 * first.wall_s + proof.wall_s
    )
    assert plan.most_gpu_seconds == pytest.approx(
        7 * first.num_gpus * first.time_limit_s + 256 * proof.time_limit_s
    )
    # A budget in GPU-seconds pays for fewer runs, and for no proof that it cannot afford; whole
    # runs need none.
    tight = bill(replace(asked, search=replace(asked.search, budget_gpu_seconds=20_000.0))).plan
    assert (tight.runs, tight.stopped_by, tight.confirmation) == (
        int(20_000 // first.gpu_seconds),
        "budget_gpu_seconds",
        None,
    )
    whole = bill(
        replace(asked, search=replace(asked.search, fidelity="full", parallel_runs=2))
    ).plan
    assert whole.confirmation is None and whole.wall_s == pytest.approx(4 * whole.first.wall_s)
    assert whole.first.step_s == pytest.approx(proof.step_s)
    # Jobs of three configurations: one start-up and two thirds, three times the steps, and a limit
    # for all of it.
    together = bill(
        replace(asked, search=replace(asked.search, fidelity="full", configurations_per_job=3))
    ).plan
    one, job = whole.first, together.first
    assert (one.configurations, job.configurations, together.runs) == (1, 3, 8)
    assert job.wall_s - 3 * 7 * job.step_s == pytest.approx(5 / 3 * 180.0, rel=0.2)
    assert (
        together.gpu_seconds == pytest.approx(8 * job.gpu_seconds / 3)
        and together.gpu_seconds < whole.gpu_seconds
    )
    assert (
        together.wall_s == pytest.approx(3 * job.wall_s)
        and together.most_gpu_seconds == 3 * 256 * job.time_limit_s
    )


def test_what_a_query_says_goes_first_and_this_host_last() -> None:
    assert launcher_name(query("two-nodes", launcher="ray")) == "ray"
    assert (
        launcher_name(query("silent"))
        == launcher_name(query({"gpu": "cpu", "num_gpus": 2}))
        == "local"
    )
    profiler_extra_or_skip()
    assert isinstance(create_launcher(replace(query("by-ray", launcher="local"))), LocalLauncher)


def test_how_runs_reach_a_cluster_is_no_part_of_its_description() -> None:
    assert "runs" not in schema.to_dict(catalog.node_type("two-nodes"))
    spec = {**CLUSTERS["silent"], "runs": {"launcher": "slurm", "options": {"setup": ["rm -rf /"]}}}
    with pytest.raises(InputError, match="unknown key 'runs'"):
        checked_registration(kind="cluster", name="from-afar", spec=spec)


def test_the_entry_of_the_documentation_is_one(own_catalogue: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    (entry,) = re.findall(
        r"^```yaml\n# my-catalogue/clusters/training-cluster.yaml\n(.*?)^```",
        page,
        re.DOTALL | re.MULTILINE,
    )
    (own_catalogue / "training-cluster.yaml").write_text(entry)
    library.clear_cache()
    assert create_launcher(query("training-cluster", parallel_runs=4)).hardware().num_gpus == 128


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"launcher": "slurm", "max_runs": 2}, "did you mean 'max_concurrent_runs'"),
        ({"launcher": "slurm", "max_concurrent_runs": 0}, "from 1 to"),
        ({"launcher": "slurm", "max_gpu_seconds_per_day": -1.0}, "from 1e-09 to"),
        ({"launcher": "local", "options": {"root": "/"}}, "accepts no options"),
        ("slurm", "must be a mapping"),
    ],
)
def test_a_mistake_in_an_entry_is_named(own_catalogue: Path, runs: Any, words: str) -> None:
    (own_catalogue / "wrong.yaml").write_text(yaml.safe_dump({**CLUSTERS["silent"], "runs": runs}))
    library.clear_cache()
    with pytest.raises(InputError, match=words):
        cluster_runs("wrong")


def test_more_runs_at_a_time_than_the_cluster_takes_are_refused() -> None:
    within_limits(schema.to_dict(query("two-nodes", parallel_runs=2)))
    with pytest.raises(InputError, match="exceeds the 2 concurrent runs") as refused:
        within_limits(schema.to_dict(query("two-nodes", parallel_runs=3)))
    assert refused.value.field == "search.parallel_runs"


def test_a_clusters_ceilings_hold_for_a_search_and_for_a_day(store: Any) -> None:
    with pytest.raises(InputError, match="exceeds the limit of 300 per search") as refused:
        tune(query=query("bounded", budget_gpu_seconds=301.0), store=store, launcher=CpuEngine())
    assert refused.value.code == "gpu_seconds_ceiling"
    first = tune(query=query({"node_type": "bounded"}), store=store, launcher=CpuEngine())
    assert (
        store.get_search(search_id=first.search.id).query["search"]["budget_gpu_seconds"] == 300.0
    )
    assert 0 < first.search.gpu_seconds <= 100
    tune(
        query=query("silent", budget_gpu_seconds=1e6), store=store, launcher=CpuEngine()
    )  # elsewhere
    tune(query=query("bounded"), store=store, launcher=CpuEngine())
    with pytest.raises(LimitError, match="cluster bounded has 280 of 400 left") as exhausted:
        for _ in range(4):
            tune(query=query("bounded"), store=store, launcher=CpuEngine())
    assert exhausted.value.code == "quota_exhausted"


def test_a_search_waits_while_others_have_all_that_the_cluster_gives(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = store.create_search(query=schema.to_dict(query("busy")), paused=True)
    _, lease = store.claim_search(holder="other", lease_s=60.0, search_id=other.id)
    run = store.intend_run(
        lease=lease,
        parallel=ParallelConfig(data_parallel_size=2),
        fidelity=Fidelity(),
        predicted={},
    )
    assert (
        store.count_open_runs(cluster="busy") == 1 and store.count_open_runs(cluster="silent") == 0
    )
    engine, results, asked, count = CpuEngine(), [], threading.Semaphore(0), store.count_open_runs

    def counting(**cluster: Any) -> int:
        asked.release()
        number: int = count(**cluster)
        return number

    monkeypatch.setattr(store, "count_open_runs", counting)
    searching = threading.Thread(
        target=lambda: results.append(tune(query=query("busy"), store=store, launcher=engine)),
        daemon=True,
    )
    searching.start()
    assert asked.acquire(timeout=60) and asked.acquire(timeout=60), (
        "it asks again, having started nothing"
    )
    assert searching.is_alive() and not engine.requests
    store.abandon_run(lease=lease, run_id=run.id, cause="done")
    searching.join(timeout=60)
    assert results and results[0].search.profile_runs == len(engine.requests) == 2
