"""A real Slurm with two virtual nodes on this host, as scripts/slurm-cluster.sh starts it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hp_tool.cluster.launchers import create
from hp_tool.cluster.launchers.slurm import SlurmLauncher

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm-cluster.sh"
OPTIONS: Mapping[str, Any] = {
    "gpu": "cpu",
    "gpus_per_node": 2,
    "max_nodes": 2,
    "partition": "batch",
    "poll_s": 0.2,
    "environment": {"GLOO_SOCKET_IFNAME": "lo"},  # both virtual nodes are this host
}
QUERY: Mapping[str, Any] = {
    "kind": "training",
    "model": {
        "name": "tiny",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 256,
    },
    "cluster": {"gpu": "cpu", "num_gpus": 1, "gpus_per_node": 1},
    "training": {"sequence_length": 32, "global_batch_size": 4, "precision": "fp32"},
    "parallel": {"micro_batch_size": [1, 2], "recompute": "none"},
    "search": {"launcher": "slurm", "budget_runs": 1, "steps": 3, "warmup_steps": 2},
}
"""A search of one run, for a trainer that needs no torch."""


NODES = {"n1", "n2"}


@dataclass(frozen=True, kw_only=True)
class SlurmCluster:
    folder: Path
    port: int
    """The first of the three it listens on."""

    def start(self) -> None:
        self._script("start")

    def stop(self) -> None:
        self._script("stop")

    def launcher(self, *, root: Path, **changes: Any) -> SlurmLauncher:
        launcher = create("slurm", options={**OPTIONS, **changes}, root=root)
        assert isinstance(launcher, SlurmLauncher)
        return launcher

    def run(self, *command: str) -> str:
        """What one of Slurm's programs prints."""
        return subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, check=True, timeout=30
        ).stdout

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "HP_SLURM_PORT": str(self.port),
        }

    def open_jobs(self) -> list[str]:
        """Jobs that have not ended, as `name state`."""
        return self.run("squeue", "--noheader", "--format=%j %T").splitlines()

    def job_id(self, folder: Path) -> str:
        """The newest job whose working directory is `folder`."""
        lines = self.run("squeue", "--noheader", "--states=all", "--format=%i|%Z").splitlines()
        return str(max(int(line.split("|")[0]) for line in lines if line.endswith(f"|{folder}")))

    @contextlib.contextmanager
    def urgent_job(self) -> Iterator[None]:
        """A job that takes both nodes whole, from a partition that goes before all others."""
        command = [
            "--parsable",
            "--partition=urgent",
            "--nodes=2",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=sleep 60",
        ]
        job_id = self.run("sbatch", *command).strip()
        yield
        self.run("scancel", job_id)

    def stop_controller(self) -> None:
        """As an administrator does it: slurmctld writes its state down and goes."""
        process = psutil.Process(int((self.folder / "run" / "slurmctld.pid").read_text()))
        process.terminate()
        process.wait(timeout=20)

    def start_controller(self) -> None:
        self._script("controller")
        until(lambda: "UP" in self.run("scontrol", "ping"))

    def kill_node(self, name: str) -> None:
        """The node's daemon and everything that runs on it, at once and from the top: what a power
        cut does.
        """
        psutil.Process(int((self.folder / "run" / f"slurmd.{name}.pid").read_text())).kill()
        while tasks := [process for process in psutil.process_iter() if _node_of(process) == name]:
            for task in tasks:
                with contextlib.suppress(psutil.Error):  # whatever went on its own meanwhile
                    for process in [*_steps_above(task), task]:
                        process.kill()

    def start_nodes(self, *names: str) -> None:
        """As an administrator brings them back: each daemon in place of an older one, and nodes
        that Slurm drained resumed.
        """
        for _ in range(5):
            with contextlib.suppress(AssertionError, subprocess.SubprocessError):
                for name in names:
                    self._script("node", name)
                until(
                    lambda: all(map(self._lives, names)) and self.idle_nodes() == NODES, limit_s=25
                )
                return
            with contextlib.suppress(
                subprocess.SubprocessError
            ):  # refused for nodes that were not drained
                self.run("scontrol", "update", f"nodename={','.join(names)}", "state=resume")
        logs = [
            (self.folder / "log" / f"slurmd.{name}.log").read_text(errors="replace")[-3000:]
            for name in names
        ]
        raise AssertionError(
            "\n".join(
                [self.run("scontrol", "show", "node", ",".join(names)), self.run("squeue"), *logs]
            )
        )

    def idle_nodes(self) -> set[str]:
        return set(
            self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()
        )

    def _lives(self, node: str) -> bool:
        """Whether its daemon runs: the controller believes in one that was killed for some seconds
        more.
        """
        written = (self.folder / "run" / f"slurmd.{node}.pid").read_text()
        return (
            bool(written)
            and psutil.pid_exists(int(written))
            and psutil.Process(int(written)).name() == "slurmd"
        )

    def _script(self, command: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(SCRIPT), command, str(self.folder), *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def _node_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("SLURMD_NODENAME")
    except psutil.Error:
        return None


def _steps_above(task: psutil.Process) -> list[psutil.Process]:
    return [parent for parent in task.parents() if parent.name().startswith("slurmstepd")]


def free_ports(*, count: int = 3, among: range = range(10_000, 20_000)) -> int:
    """The first of `count` free ports in a row, below those that the system gives away by
    itself.
    """
    blocks = among[::count]
    for first in random.sample(blocks, min(100, len(blocks))):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def until(condition: Callable[[], object], *, limit_s: float = 300.0) -> None:
    """Wait for the condition; one that cannot be asked yet is not fulfilled."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if condition():
                return
        except (subprocess.SubprocessError, OSError, psutil.Error):
            pass
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)
