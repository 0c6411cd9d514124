"""What a fault run's jobs run on: this host, or a real Slurm or Ray of its own, which loses a job
when told.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil

from hp_tool.cluster.launchers import create
from hp_tool.domain.ports import Launcher
from tests.launchers import ray_cluster, slurm_cluster
from tests.service.faults.quick_job import lines_of


class Local:
    """This host."""

    name = "local"

    def environment(self, home: Path) -> dict[str, str]:
        """What tells API and workers of it."""
        return {}

    def launcher(self, home: Path) -> Launcher:
        """The real one, over the jobs of `home`."""
        return create("local", root=home / "runs", cpu_only=True)

    def lose_job(self, home: Path) -> bool:
        """kill -9 a job and what watches over it, as a machine does that ends; False where none
        runs.
        """
        ended = {line["job"] for line in lines_of(home / "ledger") if line["event"] == "finished"}
        for line in reversed(lines_of(home / "ledger")):
            if line["event"] == "started" and line["job"] not in ended:
                with contextlib.suppress(psutil.Error):
                    job = psutil.Process(line["pid"])
                    if line["job"] in job.cmdline():
                        for process in (job.parent(), job):
                            process.kill()
                        return True
        return False

    def close(self) -> None:
        """Nothing of it stays behind."""


class Slurm(Local):
    """Two virtual nodes."""

    name = "slurm"

    def __init__(self) -> None:
        self._cluster = slurm_cluster.SlurmCluster(
            folder=Path(tempfile.mkdtemp(prefix="hp-slurm-")), port=slurm_cluster.free_ports()
        )
        self._cluster.start()
        os.environ |= (
            self._cluster.environment()
        )  # its programs are told by it which Slurm is meant

    def environment(self, home: Path) -> dict[str, str]:
        options = {**slurm_cluster.OPTIONS, "name": "faults", "python": sys.executable}
        return {**self._cluster.environment(), **_options(self.name, home, options)}

    def launcher(self, home: Path) -> Launcher:
        return self._cluster.launcher(root=home / "runs")

    def lose_job(self, home: Path) -> bool:
        """Cut a node's power under its job, and give it back."""
        busy = self._cluster.run("squeue", "--noheader", "--states=RUNNING", "--format=%N").split()
        if not busy:
            return False
        self._cluster.kill_node(busy[0])
        self._cluster.start_nodes(busy[0])
        return True

    def close(self) -> None:
        self._cluster.stop()
        shutil.rmtree(self._cluster.folder, ignore_errors=True)


class Ray(Local):
    """A head."""

    name = "ray"

    def __init__(self) -> None:
        self._cluster = ray_cluster.RayCluster()
        self._cluster.start()

    def environment(self, home: Path) -> dict[str, str]:
        options = {
            **ray_cluster.OPTIONS,
            "name": "faults",
            "address": self._cluster.address,
            "job_prefix": home.name,
        }
        return _options(self.name, home, options)

    def launcher(self, home: Path) -> Launcher:
        return self._cluster.launcher(prefix=home.name)

    def close(self) -> None:
        self._cluster.stop()
        shutil.rmtree(self._cluster.folder, ignore_errors=True)


ENGINES = {engine.name: engine for engine in (Local, Slurm, Ray)}


def _options(name: str, home: Path, options: dict[str, object]) -> dict[str, str]:
    file = home / f"{name}.json"
    file.write_text(json.dumps(options))
    return {f"HP_{name.upper()}_CONFIG": str(file)}
