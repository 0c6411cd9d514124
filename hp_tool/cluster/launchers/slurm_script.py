"""Render a job's batch script, which can also be submitted by hand.

The script contains only the job name and numbers from the query. The request is in a file, and
sbatch passes the environment.
"""

import math
import shlex
import sys

from hp_tool.cluster.launchers import jobs, readback
from hp_tool.cluster.launchers.options import Container, SlurmOptions
from hp_tool.cluster.launchers.slurm_folder import (
    CANCEL,
    CLAIM,
    ENDED,
    RANK_RESULTS,
    SLURM_LOG,
    node_log_path,
    render_step,
)
from hp_tool.domain.jobs import LaunchPlan

SCRIPT = "job.sbatch"
_TIME_MARGIN_S = 120.0
"""Seconds by which Slurm's time limit exceeds the run's own limit. Slurm counts in minutes, and a
job that Slurm ends leaves no record.
"""
_IMAGE_IMPORT_S = 1800.0
"""Seconds allowed for importing a container image on the nodes before the run starts."""
_KILL_AFTER_S = 60

_CLAIMED = """\
set -e
# Only one of the jobs submitted for this folder runs: if the controller's answer was lost, there may be two.
(set -C; echo "$SLURM_JOB_ID" > {claim}) 2> /dev/null || [ "$(< {claim})" = "$SLURM_JOB_ID" ] || exit 0"""  # noqa: E501
_RECORDED = """\
rm -f {old}
started=$(date +%s.%N)
record_end() {{
  printf '{{"exit_code": %d, "started_at": %s, "ended_at": %s}}\\n' "$?" "$started" "$(date +%s.%N)" > {ended}~
  mv {ended}~ {ended}
}}
trap record_end EXIT
# Slurm ends the job: leave no record, because Slurm's own state says why.
trap 'trap - EXIT; exit 143' TERM"""  # noqa: E501
_RENDEZVOUS = """\
# torchrun reads these; the batch step runs on the first node, and every node resolves its host's name.
export PET_MASTER_ADDR=$(hostname) PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"""  # noqa: E501
_LOGGED = """\
#!/bin/bash
{header}
{claimed}
{recorded}
cd /  # this was submitted in a folder of another host
{setup}
{rendezvous}
{step}
"""
_TEMPLATE = """\
#!/bin/bash
{header}
{claimed}
# Nothing to do: cancelled before it started, or requeued although it was done.
[ ! -e {cancel} ] && [ ! -e {result} ] || exit 0
{recorded}
{setup}
{rendezvous}
timeout --kill-after={kill_after} {timeout_s} {srun} \\
  bash -c 'export PET_NODE_RANK=$SLURM_NODEID; exec {inner}"$@" 2>&1' node \\
  {command} \\
  > {log}
"""


def render(options: SlurmOptions, *, plan: LaunchPlan) -> str:
    """Return the batch script of `plan`. It must be submitted from the job folder."""
    nodes = options.num_nodes(num_gpus=plan.num_gpus)
    header = "\n".join(
        f"#SBATCH {argument}" for argument in _sbatch(options, plan=plan, nodes=nodes)
    )
    setup = "\n".join([*(f"module load {module}" for module in options.modules), *options.setup])
    srun = " ".join(_srun(options, plan=plan, nodes=nodes))
    if options.logs is not None:
        claim, ended = (
            node_log_path(name, options=options.logs, job_name=plan.job_name)
            for name in (CLAIM, ENDED)
        )
        return _LOGGED.format(
            header=header,
            claimed=_CLAIMED.format(claim=claim),
            recorded=_RECORDED.format(old=ended, ended=ended),
            setup=setup,
            rendezvous=_RENDEZVOUS,
            step=render_step(
                plan, srun=srun, around=_apptainer(options), python=options.python or sys.executable
            ),
        )
    importing_s = 0.0 if options.container is None else _IMAGE_IMPORT_S
    limit = f"timeout --kill-after={_KILL_AFTER_S} {plan.timeout_s:g} " if importing_s else ""
    around = _apptainer(options)
    return _TEMPLATE.format(
        header=header,
        claimed=_CLAIMED.format(claim=CLAIM),
        cancel=CANCEL,
        result=jobs.RESULT,
        recorded=_RECORDED.format(old=f"{ENDED} {RANK_RESULTS}", ended=ENDED),
        setup=setup,
        rendezvous=_RENDEZVOUS,
        kill_after=_KILL_AFTER_S,
        timeout_s=f"{plan.timeout_s + importing_s:g}",
        inner="" if around else limit,
        srun=srun,
        command=f"{around}{limit if around else ''}{shlex.join(plan.command)}",
        log=jobs.LOG,
    )


def _sbatch(options: SlurmOptions, *, plan: LaunchPlan, nodes: int) -> list[str]:
    per_node = plan.num_gpus // nodes
    importing_s = _IMAGE_IMPORT_S if options.container is not None else 0.0
    wall_s = (
        options.time_s
        if options.time_s is not None
        else plan.timeout_s + _TIME_MARGIN_S + importing_s
    )
    logs, job_name = options.logs, plan.job_name
    slurm_log = (
        SLURM_LOG if logs is None else node_log_path(SLURM_LOG, options=logs, job_name=job_name)
    )
    excluded = [host for host in plan.excluded_hosts if readback.is_host_name(host)]
    options_by_name = {
        name: getattr(options, name) for name in ("account", "partition", "qos", "comment")
    }
    return [
        f"--job-name={jobs.check_name(plan.job_name)}",
        *(
            _quote_argument(f"--{name}={jobs.fill_template(value, plan=plan)}")
            for name, value in options_by_name.items()
            if value is not None
        ),
        *([f"--clusters={','.join(options.clusters)}"] if options.clusters else []),
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *_devices(options, per_node=per_node),
        *_node_share(options),
        *([f"--exclude={','.join(excluded)}"] if excluded else []),
        f"--time={math.ceil(wall_s / 60)}",
        "--requeue" if options.requeue else "--no-requeue",
        f"--output={slurm_log}",
        "--open-mode=truncate",
        *map(_quote_argument, options.sbatch_arguments),
    ]


def _quote_argument(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f'{name}{equals}"{value}"' if " " in value else argument


def _devices(options: SlurmOptions, *, per_node: int) -> list[str]:
    if options.gpu == "cpu":
        return [f"--cpus-per-task={per_node}"]
    gres = "gpu" if options.gres is None else options.gres
    return [f"--gres={gres}:{per_node}"] if gres else []


def _node_share(options: SlurmOptions) -> list[str]:
    """Return the options that request whole nodes or shares of nodes.

    Memory options in `sbatch_arguments` take precedence.
    """
    shares = {"--cpus-per-gpu": options.cpus_per_gpu, "--mem-per-gpu": options.memory_per_gpu}
    shared = any(shares.values())
    whole_nodes = (
        (options.gpu != "cpu" and not shared) if options.exclusive is None else options.exclusive
    )
    sets_memory = shared or any(
        argument.startswith("--mem") for argument in options.sbatch_arguments
    )
    return [
        *(["--exclusive"] if whole_nodes else []),
        *(["--mem=0"] if whole_nodes and options.gpu != "cpu" and not sets_memory else []),
        *(f"{name}={value}" for name, value in shares.items() if value is not None),
    ]


def _srun(options: SlurmOptions, *, plan: LaunchPlan, nodes: int) -> list[str]:
    """Return the srun command, with one task per node.

    The task is not bound to a core, because it starts all processes of its node.
    """
    arguments = [
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        "--mpi=none",
    ]
    shared = options.logs is None
    if options.logs is None:
        arguments.append("--input=none")
    else:
        log = node_log_path("%n.log", options=options.logs, job_name=plan.job_name)
        arguments += ["--input=all", f"--output={log}", "--open-mode=truncate"]
    if options.container is not None and options.container.runtime == "pyxis":
        arguments += _pyxis(options.container, shared=shared)
    return ["srun", *arguments, *map(shlex.quote, options.srun_arguments)]


def _pyxis(container: Container, *, shared: bool) -> list[str]:
    mounts = [*(["$PWD:$PWD"] if shared else []), *container.mounts]
    home = {None: [], True: ["--container-mount-home"], False: ["--no-container-mount-home"]}[
        container.mount_home
    ]
    return [
        f"--container-image={shlex.quote(container.image)}",
        *([f'"--container-mounts={",".join(mounts)}"'] if mounts else []),
        *(['"--container-workdir=$PWD"'] if shared else []),
        *([f"--container-name={container.name}"] if container.name is not None else []),
        *([f"--container-env={','.join(container.env)}"] if container.env else []),
        *(["--container-writable"] if container.writable else []),
        *home,
    ]


def _apptainer(options: SlurmOptions) -> str:
    """Return the Apptainer prefix of a node's command with a trailing space; empty without it."""
    container = options.container
    if container is None or container.runtime != "apptainer":
        return ""
    shared = options.logs is None
    devices = [] if options.gpu == "cpu" else ["--rocm" if options.gpu.startswith("mi") else "--nv"]
    words = [
        *("apptainer", "exec", *devices),
        *(['--bind "$PWD:$PWD" --pwd "$PWD"'] if shared else []),
        *(f"--bind {shlex.quote(mount)}" for mount in container.mounts),
        *(f'--env "{name}=${name}"' for name in container.env),
        *(["--writable-tmpfs"] if container.writable else []),
        *(["--no-home"] if container.mount_home is False else []),
        shlex.quote(container.image),
    ]
    return " ".join(words) + " "
