"""Plans of jobs: the torchrun command of the profiler or of a program in its place, its environment
and its files.
"""

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import hp_tool
from hp_tool.cluster.launchers import jobs
from hp_tool.cluster.launchers.options import ClusterOptions
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import ProfileRequest, Program
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError

# All that a job inherits. Database addresses, API keys and the like stay with the worker.
_INHERITED = (
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "USER",
    "VIRTUAL_ENV",
)
_INHERITED_PREFIXES = ("CUDA_", "NCCL_", "NVIDIA_", "TORCH_", "TRITON_")
_INHERITED_ELSEWHERE = ("HOME", "LANG", "LC_ALL", "PATH", "USER")
"""What is right on other hosts, too."""
_RENDEZVOUS = "rendezvous.py"
"""Of torchrun's agent with a store that listens on one address, laid into the job's folder."""
_OF_THE_FRAMEWORK = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The run sets it as its framework wants it, whatever this process runs with."""
_NO_PROGRAM = Program(
    command=("-m", "hp_tool.cluster.profiler", jobs.REQUEST, jobs.RESULT), torchrun=True
)


def cluster_plan(request: RunRequest, *, job_name: str, options: ClusterOptions) -> LaunchPlan:
    """Return the plan of a job on a cluster.

    Raises InputError if the request is for another device, or for more devices than one job may
    have.
    """
    if request.gpu != options.gpu:
        message = (
            f"this {options.launcher.capitalize()} cluster has {options.gpu}, not {request.gpu}"
        )
        raise InputError(message, code="launcher_mismatch", field="cluster")
    nodes = options.num_nodes(num_gpus=request.num_gpus)
    if nodes > request.num_processes:
        message = f"vLLM runs on one node, but {request.num_gpus} devices need {nodes}"
        raise InputError(message, code="launcher_mismatch", field="cluster.num_gpus")
    return job_plan(
        request,
        job_name=job_name,
        python=options.python,
        num_nodes=nodes,
        bound=options.bind_rendezvous,
        operator=options.environment,
    )


def smallest_plan(options: ClusterOptions, *, job_name: str) -> LaunchPlan:
    """A job of one whole node that does nothing, to ask a site whether it would take it."""
    return LaunchPlan(
        job_name=job_name,
        command=("true",),
        environment={},
        files={},
        num_gpus=options.gpus_per_node,
        timeout_s=60.0,
    )


def job_plan(
    request: RunRequest,
    *,
    job_name: str,
    python: str | None = None,
    num_nodes: int = 1,
    bound: bool = False,
    operator: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Return the plan of a job whose command is run in its folder on every node by the nodes'
    interpreter (default: this one).

    On one node processes meet at a free port of the loopback device. On several, PET_MASTER_ADDR
    and PET_MASTER_PORT of the environment name the first node, and PET_NODE_RANK this one; with
    `bound` the first one listens at that address alone.
    """
    program = (request.program if isinstance(request, ProfileRequest) else None) or _NO_PROGRAM
    bound = program.torchrun and (bound or num_nodes == 1)
    agent = (_RENDEZVOUS,) if bound else ("-m", "torch.distributed.run")
    shape = (f"--nnodes={num_nodes}", f"--nproc-per-node={request.num_processes // num_nodes}")
    torchrun = (python or sys.executable, *agent, *shape)
    files = (
        {
            _RENDEZVOUS: (
                Path(hp_tool.__file__).parent / "cluster" / "profiler" / _RENDEZVOUS
            ).read_text()
        }
        if bound
        else {}
    )
    return LaunchPlan(
        job_name=jobs.check_name(job_name),
        command=(*(torchrun if program.torchrun else ()), *program.command),
        environment=_environment(request, num_nodes)
        | dict(operator or {})
        | dict(program.environment),
        files={
            **program.files,
            **files,
            jobs.REQUEST: jobs.request_json().dump_json(request, indent=1).decode(),
        },
        num_gpus=request.num_gpus,
        timeout_s=request.timeout_s,
        returns=program.returns,
    )


def _environment(request: RunRequest, num_nodes: int) -> dict[str, str]:
    """What a job needs beyond what it inherits."""
    environment = {"PYTHONUNBUFFERED": "1"}
    if request.gpu == "cpu":
        environment |= {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }  # the catalogue's `cpu`: one process, one thread
    if (
        num_nodes == 1
    ):  # nobody else has business there, and a host must not go through its network card to itself
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    package = Path(hp_tool.__file__).parents[1]
    if package not in (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))):
        environment["PYTHONPATH"] = str(
            package
        )  # running from a checkout: the job's folder is elsewhere
    return environment


def full_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job on this host: the inherited part of this process's, and over it the
    plan's.
    """
    inherited = {
        k: v for k, v in os.environ.items() if k in _INHERITED or k.startswith(_INHERITED_PREFIXES)
    }
    inherited.pop(_OF_THE_FRAMEWORK, None)
    return inherited | dict(environment)


def environment_elsewhere(
    environment: Mapping[str, str], *, inherit: Iterable[str]
) -> dict[str, str]:
    """Return the environment of a job on other hosts: what stands for them as well, what the
    operator passes on, the plan's.
    """
    names = (*_INHERITED_ELSEWHERE, *inherit)
    return {name: os.environ[name] for name in names if name in os.environ} | dict(environment)
