"""The command that starts the profiler on one host, and the environment it is given."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import hp_tool
from hp_tool.launchers import jobs

# All that a job inherits. Database addresses, API keys and the like stay with the worker.
_INHERITED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "USER", "VIRTUAL_ENV")
_INHERITED_PREFIXES = ("CUDA_", "NCCL_", "NVIDIA_", "TORCH_", "TRITON_")


def profiler_command(*, num_processes: int) -> tuple[str, ...]:
    """argv, run in the job's folder; rendezvous at a free port of the loopback device."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    return (*launcher, f"--nproc-per-node={num_processes}", "-m", "hp_tool.profiler", jobs.REQUEST, jobs.RESULT)


def job_environment(*, gpu: str) -> dict[str, str]:
    """What a job on one host needs beyond what it inherits."""
    environment = {"PYTHONUNBUFFERED": "1"}
    if gpu == "cpu":
        # The catalogue's `cpu` is one process with one thread; gloo must not go through the network card to itself.
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    package = Path(hp_tool.__file__).parents[1]
    if package not in (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))):
        environment["PYTHONPATH"] = str(package)  # running from a checkout: the job's folder is elsewhere
    return environment


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of this process's environment that jobs may see."""
    return {key: value for key, value in environment.items() if key in _INHERITED or key.startswith(_INHERITED_PREFIXES)}


def merged(environment: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a job whose plan asks for `environment`."""
    return inherited(os.environ) | dict(environment)
