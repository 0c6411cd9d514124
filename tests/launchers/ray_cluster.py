"""A real Ray cluster on this host: a head, and a second node for jobs over two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_tool.cluster.launchers import create
from hp_tool.cluster.launchers.ray_jobs import RayLauncher
from tests.launchers.slurm_cluster import free_ports, until

CPUS = 4
OPTIONS: Mapping[str, Any] = {
    "gpu": "cpu",
    "gpus_per_node": CPUS,
    "max_nodes": 2,
    "poll_s": 0.1,
    "python": sys.executable,
}


@dataclass(kw_only=True)
class RayCluster:
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="hp-ray-")))
    port: int = field(default_factory=lambda: free_ports(count=200, among=range(30_000, 32_600)))
    """The first of those it listens on: two for the cluster, ninety for each node. Ray's own choice
    would take others'.
    """
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"

    def start(self) -> None:
        self._start_node(
            "--head",
            f"--port={self.port}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.port + 1}",
        )
        until(self._answers)

    def add_node(self) -> None:
        if len(self.nodes) == 1:
            self._start_node(f"--address=127.0.0.1:{self.port}")

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.terminate()
        for node in self.nodes:
            try:
                node.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()

    def launcher(self, *, prefix: str, **changes: Any) -> RayLauncher:
        launcher = create(
            "ray", options={**OPTIONS, "address": self.address, "job_prefix": prefix, **changes}
        )
        assert isinstance(launcher, RayLauncher)
        return launcher

    def _start_node(self, *arguments: str) -> None:
        first = self.port + 10 + 90 * len(self.nodes)
        names = (
            "dashboard-agent-listen",
            "dashboard-agent-grpc",
            "runtime-env-agent",
            "metrics-export",
            "node-manager",
        )
        ports = [f"--{name}-port={first + i}" for i, name in enumerate((*names, "object-manager"))]
        limits = [
            f"--num-cpus={CPUS}",
            "--object-store-memory=80000000",
            f"--temp-dir={self.folder}",
        ]
        workers = [f"--min-worker-port={first + 10}", f"--max-worker-port={first + 89}"]
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--disable-usage-stats",
            *arguments,
        ]
        own = [
            "--node-ip-address=127.0.0.1",
            *ports,
            *limits[: 3 if "--head" in arguments else 2],
            *workers,
        ]
        with (self.folder / f"node{len(self.nodes)}.log").open("wb") as log:
            node = subprocess.Popen(
                [*command, *own],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(node)

    def _answers(self) -> bool:
        """Whether jobs can be submitted: the dashboard answers before the node is up, which Ray
        gives up after 30 s.
        """
        log = (self.folder / "node0.log").read_text()
        assert self.nodes[0].poll() is None, log
        try:
            with urllib.request.urlopen(f"{self.address}/api/jobs/", timeout=5) as answer:
                return bool(answer.status == 200) and "Ray runtime started" in log
        except (urllib.error.URLError, OSError):
            return False
