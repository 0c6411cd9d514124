"""`hp-tool doctor` finds what is wrong and names the fix, and changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hp_tool.catalog import library
from hp_tool.cli.main import build
from hp_tool.cluster import diagnostics as doctor
from hp_tool.cluster.launchers import local as devices
from hp_tool.domain.access import DatabaseState
from hp_tool.store import open_store, schema
from tests.command_line import ROOT
from tests.store.test_store_schema import set_revision

STATE = DatabaseState(
    revision=schema.HEAD, needed_revision=schema.HEAD, clock_offset_s=0.0, read_only=False
)


def examined(url: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = CliRunner().invoke(
        build(), ["doctor", "--json", "--database-url", url], catch_exceptions=False
    )
    answer = json.loads(done.stdout)
    assert answer["ok"] is (done.exit_code == 0)
    return done.exit_code, {check["name"]: check for check in answer["checks"]}


def test_a_sound_host_is_called_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_RUNS_DIR", str(tmp_path / "runs"))
    url = f"sqlite:///{tmp_path}/new/hp.sqlite3"
    code, checks = examined(url)
    assert (code, checks["database"]["status"]) == (0, "ok")
    assert "created on first use" in checks["database"]["detail"]
    assert list(tmp_path.iterdir()) == []  # looking makes nothing
    open_store(url).close()
    code, checks = examined(url)
    assert (code, checks["schema"]["status"], checks["clock"]["status"]) == (0, "ok", "ok")


def test_an_old_schema_and_an_absent_server_fail_with_their_mend(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/hp.sqlite3"
    schema.upgrade(url)
    set_revision(url, "0001")
    code, checks = examined(url)
    assert (code, checks["schema"]["fix"]) == (1, schema.UPGRADE_PREVIEW)
    assert schema.current(url) == "0001"
    code, checks = examined("postgresql://hp:secret@127.0.0.1:1/hp")
    assert (code, checks["database"]["status"]) == (1, "failed")
    assert "secret" not in json.dumps(checks)
    assert examined("mysql://x/y")[1]["database"]["status"] == "failed"


@pytest.mark.parametrize(
    ("change", "status", "name"),
    [
        ({"revision": None}, "failed", "schema"),
        ({"revision": "0099"}, "warning", "schema"),
        ({"read_only": True}, "failed", "database writable"),
        ({"clock_offset_s": -60.0}, "warning", "clock"),
        ({"overdue_webhooks": 2}, "warning", "webhooks"),
    ],
)
def test_what_is_told_of_a_database(change: dict[str, Any], status: str, name: str) -> None:
    found = {check.name: check for check in doctor.check_database_state(replace(STATE, **change))}
    assert found[name].status == status
    assert found[name].fix
    assert all(check.status == "ok" for check in doctor.check_database_state(STATE))


def test_a_folder_without_room_or_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_folder("f", tmp_path / "a" / "b", holds="fine").detail == "fine"
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 2**80)
    assert doctor.check_folder("f", tmp_path, holds="fine").status == "warning"
    monkeypatch.setattr(
        os, "access", lambda *_: False
    )  # root may write anything, so rights are played
    assert doctor.check_folder("f", tmp_path, holds="fine").status == "failed"


def test_gpus_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpu_names", lambda: ["NVIDIA H200"] * 8)
    for version, status in (("2.13.0+cpu", "failed"), ("2.13.0+cu130", "ok")):
        packages = [SimpleNamespace(version=version)]
        monkeypatch.setattr(
            importlib.metadata, "distributions", lambda *, name, packages=packages: packages
        )
        gpu = next(check for check in doctor.check_profiler() if check.name == "gpu")
        assert (gpu.status, "8 x h200" in gpu.detail) == (status, True)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda *, name: [])
    assert next(doctor.check_profiler()).fix == f"pip install -e '{ROOT}[profiler]'"


def test_slurm_answers_or_is_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm, kubectl = list(doctor.check_programs())[:2]
    assert (slurm.status, kubectl.status) == ("ok", "ok")  # a missing program never fails
    assert "apt-get install slurm-client" in slurm.detail and "https://" in kubectl.detail
    for tool in doctor.SLURM_TOOLS[:2]:
        program(tmp_path / tool, "exit 0")
    assert "scontrol, scancel missing" in doctor.check_slurm().detail
    for answer, status in (
        ("Slurmctld(primary) at head is UP", "ok"),
        ("Slurmctld(primary) at head is DOWN", "warning"),
    ):
        for tool in doctor.SLURM_TOOLS:
            program(tmp_path / tool, f"echo '{answer}'")
        assert (doctor.check_slurm().status, doctor.check_slurm().detail) == (status, answer)


def test_clusters_that_are_named_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "catalogue" / "clusters"
    folder.mkdir(parents=True)
    node = {
        "gpu": "cpu",
        "gpus_per_node": 2,
        "inter_node_bandwidth_bytes_per_second": 1e9,
        "fabric": "x",
        "num_gpus": 2,
    }
    kubernetes = {"image": "r.example/hp:1", "kubectl": str(tmp_path / "kubectl")}
    runs = {
        "here": {"launcher": "local"},
        "pods": {"launcher": "kubernetes", "options": kubernetes},
        "away": {"launcher": "ray", "options": {"address": "http://127.0.0.1:1"}},
        "wrong": {"launcher": "slurm", "options": {"partion": "gpu"}},
    }
    for name, each in runs.items():
        (folder / f"{name}.yaml").write_text(json.dumps({**node, "runs": each}))
    program(tmp_path / "kubectl", "echo yes")
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path / "catalogue"))
    for name in ("RAY", "SLURM", "KUBERNETES"):
        monkeypatch.setenv(f"HP_{name}_CONFIG", str(tmp_path / f"{name}.yaml"))
    (tmp_path / "RAY.yaml").write_text("gpu: cpu\n")
    library.clear_cache()
    try:
        found = {check.name: check for check in doctor.check_clusters()}
    finally:
        library.clear_cache()
    told = {name: check.status for name, check in found.items()}
    assert told == {
        "cluster here": "ok",
        "cluster pods": "ok",
        "cluster away": "warning",
        "cluster wrong": "failed",
        "ray": "failed",
    }
    assert "refused" in found["cluster away"].detail and "partion" in found["cluster wrong"].detail
    assert "gpus_per_node" in found["ray"].detail


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
