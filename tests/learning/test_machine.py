"""Micro-benchmarks of a cluster: really timed, kept as its profile, and used by its estimates
alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hp_tool import catalog
from hp_tool.catalog import library
from hp_tool.catalog.efficiency import (
    MachineProfile,
    efficiency_profile,
    gpu_efficiency,
    machine_profile,
    save_machine_profile,
)
from hp_tool.cli.main import build
from hp_tool.cluster.launchers import create
from hp_tool.domain.efficiency import Link
from hp_tool.errors import InputError
from hp_tool.loop.learning import machine
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from tests.conftest import skip_or_fail

SLOW_LINK = Link(bandwidth_fraction=0.1, latency_s=1e-3, latency_per_peer_s=1e-3, ramp_bytes=0.0)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty catalogue folder of one's own."""
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path / "catalog"))
    library.clear_cache()
    yield tmp_path / "catalog"
    library.clear_cache()


def _step_s(cluster: object) -> float:
    query = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": cluster,
        "training": {"sequence_length": 4096, "global_batch_size": 64},
        "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 1},
    }
    return estimate(query=parse_query(query)).time.step_s


def test_a_measured_profile_serves_its_cluster_and_no_other(own: Path) -> None:
    lab = {"name": "My lab/../x", "gpu": "h100-sxm-80gb", "num_gpus": 16}
    before, other = _step_s(lab), _step_s({**lab, "name": "other"})
    slower = dataclasses.replace(
        gpu_efficiency(catalog.gpu("h100-sxm-80gb")), gpu="h100-sxm-80gb", nvlink=SLOW_LINK
    )
    path = save_machine_profile("My lab/../x", MachineProfile(gpu=slower, network=SLOW_LINK))
    assert path.parent == own / "efficiency" and path.name == "my-lab-x.yaml"
    assert machine_profile("My lab/../x") == MachineProfile(gpu=slower, network=SLOW_LINK)
    assert _step_s(lab) > 1.2 * before
    assert _step_s({**lab, "name": "other"}) == other == before


def test_a_profile_of_another_gpu_is_left_alone(own: Path) -> None:
    save_machine_profile("lab", MachineProfile(gpu=gpu_efficiency(catalog.gpu("a100-sxm-80gb"))))
    device = catalog.gpu("h100-sxm-80gb")
    assert efficiency_profile(
        gpu=device, framework="megatron-core", cluster="lab"
    ) == efficiency_profile(gpu=device, framework="megatron-core")


def test_what_cannot_be_timed_is_refused() -> None:
    with pytest.raises(
        InputError, match="timed in bf16, fp16, fp32 on h100-sxm-80gb, not in 'fp8'"
    ):
        machine.checked_precisions(["fp8"], gpu=catalog.gpu("h100-sxm-80gb"))
    with pytest.raises(InputError, match="the launcher runs on cpu"):
        machine.benchmark_machine(
            cluster=catalog.cluster("dgx-h100"),
            launcher=create("local", cpu_only=True),
            precisions=("bf16",),
        )


@pytest.mark.long
@pytest.mark.components
def test_the_command_measures_this_host(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, really timed; few repetitions and a short list, so that it is over in half a
    minute.
    """
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    monkeypatch.setenv("HP_DATABASE_URL", f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    shortened = machine.plan_operations
    monkeypatch.setattr(machine, "plan_operations", lambda *a, **k: shortened(*a, **k)[::4])
    done = CliRunner().invoke(build(), ["calibrate", "--cluster", "local", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)["machine"]
    assert {"matmul fp32", "attention", "memory-bound kernels", "inside a node"} <= report[
        "errors"
    ].keys()
    assert report["check"]["measured_s"] > 0
    assert report["check"]["before_s"] != report["check"]["after_s"]
    kept = machine_profile("local")
    assert kept is not None and kept.gpu.gpu == "cpu" and kept.network is None
    assert "hp-tool calibrate --cluster" in kept.gpu.fitted_on


def test_a_saved_profile_has_no_field_at_its_default(own: Path) -> None:
    """An earlier edition on the same host rejects fields that it does not know."""
    measured = dataclasses.replace(
        gpu_efficiency(catalog.gpu("a100-sxm-80gb")), attention_kernels={}
    )
    path = save_machine_profile("lab", MachineProfile(gpu=measured))
    written = yaml.safe_load(path.read_text())
    assert "attention_kernels" not in written and None not in written.values()
    known = machine_profile("lab")
    assert known is not None and known.gpu == measured
