"""The commands that start the profiler or a program in its place, and the environment they are given."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import hp_tool
from hp_tool.domain.measurement import ProfileRequest, Program
from hp_tool.domain.requests import RunRequest
from hp_tool.launchers import jobs

# All that a job inherits. Database addresses, API keys and the like stay with the worker.
_INHERITED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "USER", "VIRTUAL_ENV")
_INHERITED_PREFIXES = ("CUDA_", "NCCL_", "NVIDIA_", "TORCH_", "TRITON_")
_PROFILER = ("-m", "hp_tool.profiler", jobs.REQUEST, jobs.RESULT)


def one_node_command(request: RunRequest, *, python: str | None = None) -> tuple[str, ...]:
    """argv, run in the job's folder; rendezvous at a free port of the loopback device.

    `python` is the node's interpreter (default: this one).
    """
    launcher = (python or sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    return _started((*launcher, f"--nproc-per-node={request.num_processes}"), request)


def multi_node_command(request: RunRequest, *, num_nodes: int, python: str | None = None) -> tuple[str, ...]:
    """argv, run in the job's folder on every node; `python` is the nodes' interpreter (default: this one).

    PET_MASTER_ADDR and PET_MASTER_PORT in its environment say where the first node listens, PET_NODE_RANK which one it is.
    """
    launcher = (python or sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes}")
    return _started((*launcher, f"--nproc-per-node={request.num_processes // num_nodes}"), request)


def _started(launcher: tuple[str, ...], request: RunRequest) -> tuple[str, ...]:
    """torchrun with the profiler or the request's own program; a program that does without torchrun stands alone."""
    program = _program(request)
    if program is None:
        return (*launcher, *_PROFILER)
    return (*launcher, *program.command) if program.torchrun else program.command


def _program(request: RunRequest) -> Program | None:
    return request.program if isinstance(request, ProfileRequest) else None


def job_files(request: RunRequest) -> dict[str, str]:
    """What a job finds in its folder."""
    program = _program(request)
    return {**(program.files if program else {}), jobs.REQUEST: jobs.REQUEST_JSON.dump_json(request, indent=1).decode()}


def job_returns(request: RunRequest) -> tuple[str, ...]:
    """Files that are asked for afterwards, beside the result."""
    program = _program(request)
    return program.returns if program else ()


def job_environment(request: RunRequest, *, num_hosts: int = 1, operator: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a job on `num_hosts` hosts needs beyond what it inherits. The operator's words win, over them its own program's."""
    environment = {"PYTHONUNBUFFERED": "1"}
    if request.gpu == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # the catalogue's `cpu`: one process, one thread
        if num_hosts == 1:
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # a host must not go through its network card to itself
    package = Path(hp_tool.__file__).parents[1]
    if package not in (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))):
        environment["PYTHONPATH"] = str(package)  # running from a checkout: the job's folder is elsewhere
    program = _program(request)
    return environment | dict(operator or {}) | (program.environment if program else {})


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of this process's environment that jobs may see."""
    return {key: value for key, value in environment.items() if key in _INHERITED or key.startswith(_INHERITED_PREFIXES)}


def merged(environment: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a job whose plan asks for `environment`."""
    return inherited(os.environ) | dict(environment)
