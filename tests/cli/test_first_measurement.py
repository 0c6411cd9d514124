"""A search on this host's processor times it first, once, and its predictions are then this
processor's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_tool.catalog import library
from hp_tool.catalog.efficiency import MachineProfile, gpu_efficiency
from hp_tool.cli import tune
from hp_tool.cluster.launchers.local import LocalLauncher
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.errors import LauncherError
from hp_tool.loop.learning import machine
from hp_tool.loop.tuning import clusters
from hp_tool.questions import schema
from hp_tool.questions.training.problem import resolve_training

QUICKSTART = (Path(__file__).parents[2] / "examples" / "quickstart.yaml").read_text()


class Host(LocalLauncher):
    """This host with two processors, which runs nothing."""

    def __init__(self) -> None: ...

    def hardware(self) -> Any:
        return SimpleNamespace(num_gpus=2, gpu="cpu")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The precisions in which a stand-in times the host; it finds matmuls at a tenth of the
    peak.
    """
    seen: list[str] = []

    def benchmark(*, cluster: ClusterSpec, launcher: Any, precisions: tuple[str, ...]) -> Any:
        seen.extend(precisions)
        found = gpu_efficiency(cluster.gpu)
        slow = replace(found.matmul["bf16"], peak_fraction=0.1)
        profile = MachineProfile(gpu=replace(found, matmul={**found.matmul, "bf16": slow}))
        return SimpleNamespace(profile=profile, wall_s=2.0), None

    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    monkeypatch.setattr(clusters, "create_launcher", lambda query: Host())
    monkeypatch.setattr(machine, "benchmark_machine", benchmark)
    library.clear_cache()
    yield seen
    library.clear_cache()


def test_the_host_is_timed_once_in_the_precision_of_the_search(
    timed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    query = schema.parse_query(QUICKSTART)
    before = resolve_training(query).profile.gpu.matmul["bf16"].peak_fraction
    tune._calibrate_host(query)
    tune._calibrate_host(query)
    assert timed == ["bf16"]
    assert resolve_training(query).profile.gpu.matmul["bf16"].peak_fraction < 0.5 * before
    printed = capsys.readouterr()
    assert printed.out == "" and "delete this file to measure again" in printed.err


@pytest.mark.parametrize(
    "changes", [{"gpu": "h100-sxm-80gb", "num_gpus": 8}, {"gpu": "cpu", "num_gpus": 4}]
)
def test_other_hardware_is_not_timed(timed: list[str], changes: dict[str, Any]) -> None:
    query = schema.parse_query(QUICKSTART)
    tune._calibrate_host(
        replace(
            query,
            cluster=schema.parse_query(schema.query_mapping(query) | {"cluster": changes}).cluster,
        )
    )
    assert timed == []


def test_a_host_that_cannot_be_timed_is_searched_all_the_same(
    timed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: Any) -> None:
        raise LauncherError("no torchrun")

    monkeypatch.setattr(machine, "benchmark_machine", broken)
    tune._calibrate_host(schema.parse_query(QUICKSTART))
    assert "benchmark failed: no torchrun" in capsys.readouterr().err
