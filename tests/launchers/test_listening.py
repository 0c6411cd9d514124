"""Who can reach a job on one node: what its processes listen on, and whether its store answers
beyond the loopback device.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hp_tool.cluster.launchers import create, torchrun
from hp_tool.cluster.launchers.options import RayOptions
from hp_tool.domain.measurement import Program
from hp_tool.domain.ports import Launcher
from hp_tool.domain.states import JobState
from tests.conftest import skip_or_fail
from tests.launchers.contract import wait
from tests.launchers.slurm_cluster import until
from tests.profiler.requests import request

pytestmark = pytest.mark.components


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    launcher = create("local", root=tmp_path, cpu_only=True)
    yield launcher
    launcher.cancel("run")


def _listening(folder: Path) -> dict[tuple[str, int], str]:
    """Address and port -> program, of every process of the job in `folder`."""
    sockets = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("HP_JOB_FOLDER") == str(folder):
                for each in process.net_connections("inet"):
                    if each.status == psutil.CONN_LISTEN:
                        sockets[each.laddr.ip, each.laddr.port] = " ".join(process.cmdline()[1:4])
        except psutil.Error:
            continue
    return sockets


def _own_addresses() -> list[str]:
    """This host's addresses that others can reach."""
    every = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    inet = [
        each.address
        for each in every
        if each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address
    ]
    return [address for address in inet if not ipaddress.ip_address(address).is_loopback]


def test_jobs_on_one_node_listen_only_on_their_host(launcher: Launcher, tmp_path: Path) -> None:
    parallel = {"tensor_parallel_size": 2, "sequence_parallel": True}
    handle = launcher.submit(
        launcher.plan(request(parallel=parallel, steps=100_000), job_name="run")
    )
    wait(launcher, handle, until={JobState.RUNNING})
    until(
        lambda: (
            "hp-tool step" in launcher.output(handle) or not launcher.poll([handle])[handle].is_open
        )
    )
    sockets = _listening(tmp_path / "run")
    assert sockets, launcher.output(handle)
    open_to_others = {
        where: what
        for where, what in sockets.items()
        if not ipaddress.ip_address(where[0]).is_loopback
    }
    assert open_to_others == {}

    for address in _own_addresses():
        for _, port in sockets:
            with pytest.raises(OSError), socket.create_connection((address, port), timeout=2.0):
                pass


ON_TWO_NODES = """
import os, sys, time, torch, torch.distributed as distributed
distributed.init_process_group("gloo")
seen = [None, None]
distributed.all_gather_object(seen, os.environ["GROUP_RANK"])
print("met", *seen, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.long
def test_a_store_for_several_nodes_can_be_held_to_the_address_that_peers_are_given(
    tmp_path: Path,
) -> None:
    """Two agents of one job, as two nodes start them, that meet at 127.0.0.2."""
    if not importlib.util.find_spec("torch"):
        skip_or_fail(component="MEGATRON", reason="torch (the profiler extra) is not installed")
    options = RayOptions(
        gpu="cpu", gpus_per_node=1, max_nodes=2, bind_rendezvous=True, python=sys.executable
    )
    program = Program(command=("meet.py", "4"), files={"meet.py": ON_TWO_NODES})
    asked = replace(
        request(parallel={"tensor_parallel_size": 2, "sequence_parallel": True}), program=program
    )
    planned = torchrun.cluster_plan(asked, job_name="run", options=options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    nodes = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir()
        for name, text in planned.files.items():
            (folder / name).write_text(text)
        there = {
            "PET_MASTER_ADDR": "127.0.0.2",
            "PET_MASTER_PORT": str(port),
            "PET_NODE_RANK": str(node),
        }
        variables = (
            torchrun.full_environment(planned.environment) | there | {"GLOO_SOCKET_IFNAME": "lo"}
        )
        with (folder / "log").open("w") as log:
            nodes.append(
                subprocess.Popen(planned.command, cwd=folder, env=variables, stdout=log, stderr=log)
            )
    try:
        until(
            lambda: all(
                "met 0 1" in (tmp_path / str(node) / "log").read_text() for node in range(2)
            )
        )
        every = [psutil.Process(node.pid) for node in nodes]
        tree = [each for process in every for each in (process, *process.children(recursive=True))]
        listening = [
            each.laddr
            for one in tree
            for each in one.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        ]
        assert ("127.0.0.2", port) in listening
        assert {each.ip for each in listening} <= {"127.0.0.1", "127.0.0.2"}
        assert [node.wait(60) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
