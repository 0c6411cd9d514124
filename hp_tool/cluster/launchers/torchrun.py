"""Plan how a job is launched: command, environment and files of the profiler or of another
program.
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

# Variables that a job inherits. Others, such as database URLs and API keys, stay with the worker.
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
"""Variables that are also valid on other hosts."""
_RENDEZVOUS = "rendezvous.py"
"""A torchrun rendezvous whose store listens on a single address; it is copied to the job's
folder.
"""
_FRAMEWORK_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable that the run sets as its framework needs, so that it is not inherited."""
_NO_PROGRAM = Program(
    command=("-m", "hp_tool.cluster.profiler", jobs.REQUEST, jobs.RESULT), torchrun=True
)


def cluster_plan(request: RunRequest, *, job_name: str, options: ClusterOptions) -> LaunchPlan:
    """Plan a job on a cluster.

    Raises:
        InputError: The cluster has another device, or cannot run a job with this many devices.
    """
    if request.gpu != options.gpu:
        message = (
            f"This {options.launcher.capitalize()} cluster has {options.gpu}, not {request.gpu}."
        )
        raise InputError(message, code="launcher_mismatch", field="cluster")
    nodes = options.num_nodes(num_gpus=request.num_gpus)
    if nodes > request.num_processes:
        message = f"vLLM runs on one node, but {request.num_gpus} devices need {nodes} nodes."
        raise InputError(message, code="launcher_mismatch", field="cluster.num_gpus")
    return job_plan(
        request,
        job_name=job_name,
        python=options.python,
        num_nodes=nodes,
        bound=options.bind_rendezvous,
        operator_environment=options.environment,
    )


def smallest_plan(options: ClusterOptions, *, job_name: str) -> LaunchPlan:
    """Plan a job on one node that does nothing, to test whether the site accepts jobs."""
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
    operator_environment: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Plan a job whose command runs in the job's folder on every node.

    On one node, processes connect through a free loopback port. On several nodes, the environment
    variables PET_MASTER_ADDR and PET_MASTER_PORT name the first node, and PET_NODE_RANK is the
    node's number.

    Args:
        request: What to run.
        job_name: Name of the job.
        python: Interpreter on the nodes; by default that of this process.
        num_nodes: Number of nodes.
        bound: Let the first node listen on its own address only.
        operator_environment: Environment variables that the operator sets.
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
        | dict(operator_environment or {})
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
    environment = {"PYTHONUNBUFFERED": "1"}
    if request.gpu == "cpu":
        # The catalogue's `cpu` is one process with one thread.
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if num_nodes == 1:  # use loopback: private, and independent of the network card
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    package = Path(hp_tool.__file__).parents[1]
    if package not in (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))):
        environment["PYTHONPATH"] = str(package)  # a checkout: the job runs in another folder
    return environment


def full_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job on this host: inherited variables, overridden by the
    plan's.
    """
    inherited = {
        k: v for k, v in os.environ.items() if k in _INHERITED or k.startswith(_INHERITED_PREFIXES)
    }
    inherited.pop(_FRAMEWORK_VARIABLE, None)
    return inherited | dict(environment)


def environment_elsewhere(
    environment: Mapping[str, str], *, inherit: Iterable[str]
) -> dict[str, str]:
    """Return the environment of a job on other hosts: portable variables and `inherit`, overridden
    by the plan's.
    """
    names = (*_INHERITED_ELSEWHERE, *inherit)
    return {name: os.environ[name] for name in names if name in os.environ} | dict(environment)
