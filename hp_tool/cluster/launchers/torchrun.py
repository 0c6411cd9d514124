"""Plan a job launch: command, environment and files of the profiler or of another program."""

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

# Variables that a job inherits. Others, such as database URLs and API keys, are not passed on.
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
"""Inherited variables that are also valid on other hosts."""
_RENDEZVOUS = "rendezvous.py"
"""Name of the rendezvous module, whose store listens on a single address. It is copied to the job
folder.
"""
_FRAMEWORK_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable that is not inherited, because the run sets it to what its framework needs."""
_NO_PROGRAM = Program(
    command=("-m", "hp_tool.cluster.profiler", jobs.REQUEST, jobs.RESULT), torchrun=True
)


def cluster_plan(request: RunRequest, *, job_name: str, options: ClusterOptions) -> LaunchPlan:
    """Plan a job on a cluster.

    Raises:
        InputError: The cluster has a different device, or cannot run a job with this many devices.
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
    """Plan a single-node job that does nothing, to test whether the site accepts jobs."""
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
    """Plan a job whose command runs in the job folder on every node.

    On one node, processes connect through a free loopback port. On several nodes, PET_MASTER_ADDR
    and PET_MASTER_PORT in the environment give the first node's address, and PET_NODE_RANK is the
    node number.

    Args:
        request: What to run.
        job_name: Name of the job.
        python: Interpreter on the nodes; by default this process's.
        num_nodes: Number of nodes.
        bound: Let the first node listen only on its own address.
        operator_environment: Environment variables set by the operator.
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
        # In the catalogue, one `cpu` device is one process with one thread.
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if num_nodes == 1:  # use loopback: private, and independent of the network card
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    package = Path(hp_tool.__file__).parents[1]
    if package not in (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))):
        environment["PYTHONPATH"] = str(package)  # a checkout: the job runs in another folder
    return environment


def full_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a local job's environment: inherited variables, overridden by the plan's."""
    inherited = {
        k: v for k, v in os.environ.items() if k in _INHERITED or k.startswith(_INHERITED_PREFIXES)
    }
    inherited.pop(_FRAMEWORK_VARIABLE, None)
    return inherited | dict(environment)


def environment_elsewhere(
    environment: Mapping[str, str], *, inherit: Iterable[str]
) -> dict[str, str]:
    """Return the environment of a job on other hosts.

    It has the portable variables and those in `inherit`, overridden by the plan's.
    """
    names = (*_INHERITED_ELSEWHERE, *inherit)
    return {name: os.environ[name] for name in names if name in os.environ} | dict(environment)
