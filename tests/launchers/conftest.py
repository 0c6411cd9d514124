"""The cluster engines that launcher tests run against."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.launchers.ray_cluster import RayCluster
from tests.launchers.slurm_cluster import NODES, SlurmCluster, free_ports, until

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue")


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A Slurm of this session's own."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    if missing or os.geteuid() != 0:
        reason = (
            f"no {', '.join(missing)}: scripts/slurm-cluster.sh install"
            if missing
            else "Slurm's nodes start as root only"
        )
        skip_or_fail(component="SLURM", reason=reason)
    cluster = SlurmCluster(folder=Path(tempfile.mkdtemp(prefix="hp-slurm-")), port=free_ports())
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(cluster.folder, ignore_errors=True)


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster with both nodes idle and an empty queue. A test leaves no job behind."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.folder / "slurm.conf"))
    monkeypatch.delenv("HP_SLURM_CONFIG", raising=False)
    yield slurm_cluster
    try:
        until(lambda: slurm_cluster.open_jobs() == [])
    except AssertionError:  # one test's failure is not the next one's
        slurm_cluster.run("scancel", "--partition=batch")
        raise
    try:
        until(lambda: slurm_cluster.idle_nodes() == NODES, limit_s=20)
    except (
        AssertionError
    ):  # a node that died, or that the controller took for down while the machine was busy
        slurm_cluster.start_nodes(*NODES - slurm_cluster.idle_nodes())


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A Ray cluster of this session's own."""
    if importlib.util.find_spec("ray") is None:
        skip_or_fail(component="RAY", reason="ray (the ray extra) is not installed")
    cluster = RayCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(cluster.folder, ignore_errors=True)
