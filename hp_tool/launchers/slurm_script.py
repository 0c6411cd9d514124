"""The batch script of one job: pure, printable, and of use to a person who submits it by hand.

Nothing of a query is in it. The request travels in a file, the environment through sbatch's own, and what remains is the
job's name, numbers, the operator's checked words, and the quoted argv.
"""

from __future__ import annotations

import math
import shlex
import sys

from hp_tool.domain.ports import LaunchPlan
from hp_tool.launchers import jobs, slurm_logs
from hp_tool.launchers.slurm_folder import CANCEL, CLAIM, ENDED, RANK_RESULTS, SLURM_LOG
from hp_tool.launchers.slurm_options import SlurmOptions

SCRIPT = "job.sbatch"
_GRACE_S = 120.0
"""Slurm's own limit is a backstop: it counts minutes, and its end leaves no record of the job's."""
_KILL_AFTER_S = 60

_CLAIMED = """\
set -e
# Of all jobs submitted for this folder one runs: where the controller's answer was lost, there may be two.
(set -C; echo "$SLURM_JOB_ID" > {claim}) 2> /dev/null || [ "$(< {claim})" = "$SLURM_JOB_ID" ] || exit 0"""
_RECORDED = """\
rm -f {old}
started=$(date +%s.%N)
record_end() {{
  printf '{{"exit_code": %d, "started_at": %s, "ended_at": %s}}\\n' "$?" "$started" "$(date +%s.%N)" > {ended}~
  mv {ended}~ {ended}
}}
trap record_end EXIT
# Slurm ends the job: that is no end of its own, and Slurm has the word for it.
trap 'trap - EXIT; exit 143' TERM"""
_RENDEZVOUS = """\
# torchrun reads these; the batch step runs on the first node, and every node resolves its host's name.
export PET_MASTER_ADDR=$(hostname) PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"""
_LOGGED = """\
#!/bin/bash
{header}
{claimed}
{recorded}
cd /  # the folder that this was submitted in is another host's
{setup}
{rendezvous}
{step}
"""
_TEMPLATE = """\
#!/bin/bash
{header}
{claimed}
# Nothing to do: cancelled before it began, or requeued although it was done.
[ ! -e {cancel} ] && [ ! -e {result} ] || exit 0
{recorded}
{setup}
{rendezvous}
timeout --kill-after={kill_after} {timeout_s} {srun} \\
  bash -c 'export PET_NODE_RANK=$SLURM_NODEID; exec "$@" 2>&1' node \\
  {command} \\
  > {log}
"""


def render(options: SlurmOptions, *, plan: LaunchPlan) -> str:
    """The script for `plan`, to be submitted in the job's folder."""
    nodes = jobs.nodes_for(plan.num_gpus, gpus_per_node=options.gpus_per_node, max_nodes=options.max_nodes)
    header = "\n".join(f"#SBATCH {argument}" for argument in _sbatch(options, plan=plan, nodes=nodes))
    setup = "\n".join([*(f"module load {module}" for module in options.modules), *options.setup])
    srun = " ".join(_srun(options, plan=plan, nodes=nodes))
    if options.logs is not None:
        ended = slurm_logs.ended(options.logs.folder, plan.job_name)
        return _LOGGED.format(
            header=header,
            claimed=_CLAIMED.format(claim=slurm_logs.claim(options.logs.folder, plan.job_name)),
            recorded=_RECORDED.format(old=ended, ended=ended),
            setup=setup,
            rendezvous=_RENDEZVOUS,
            step=slurm_logs.step(plan, srun=srun, python=options.python or sys.executable),
        )
    return _TEMPLATE.format(
        header=header,
        claimed=_CLAIMED.format(claim=CLAIM),
        cancel=CANCEL,
        result=jobs.RESULT,
        recorded=_RECORDED.format(old=f"{ENDED} {RANK_RESULTS}", ended=ENDED),
        setup=setup,
        rendezvous=_RENDEZVOUS,
        kill_after=_KILL_AFTER_S,
        timeout_s=f"{plan.timeout_s:g}",
        srun=srun,
        command=shlex.join(plan.command),
        log=jobs.LOG,
    )


def _sbatch(options: SlurmOptions, *, plan: LaunchPlan, nodes: int) -> list[str]:
    per_node = plan.num_gpus // nodes
    wall_s = options.time_s if options.time_s is not None else plan.timeout_s + _GRACE_S
    slurm_log = SLURM_LOG if options.logs is None else slurm_logs.slurm_log(options.logs.folder, plan.job_name)
    named = {name: getattr(options, name) for name in ("account", "partition", "qos")}
    return [
        f"--job-name={jobs.check_name(plan.job_name)}",
        *(f"--{name}={value}" for name, value in named.items() if value is not None),
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *_devices(options, per_node=per_node),
        *(["--exclusive"] if options.exclusive else []),
        f"--time={math.ceil(wall_s / 60)}",
        "--requeue" if options.requeue else "--no-requeue",
        f"--output={slurm_log}",
        "--open-mode=truncate",
        *options.sbatch_arguments,
    ]


def _devices(options: SlurmOptions, *, per_node: int) -> list[str]:
    if options.gpu == "cpu":
        return [f"--cpus-per-task={per_node}"]
    gres = "gpu" if options.gres is None else options.gres
    return [f"--gres={gres}:{per_node}"] if gres else []


def _srun(options: SlurmOptions, *, plan: LaunchPlan, nodes: int) -> list[str]:
    """One task on each node, which starts that node's processes itself and so must not be bound to one core."""
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
        log = slurm_logs.node_log(options.logs.folder, plan.job_name, "%n")
        arguments += ["--input=all", f"--output={log}", "--open-mode=truncate"]
    if options.container is not None:
        mounts = [*(["$PWD:$PWD"] if shared else []), *options.container.mounts]
        arguments.append(f"--container-image={shlex.quote(options.container.image)}")
        arguments += [f'"--container-mounts={",".join(mounts)}"'] if mounts else []
        arguments += ['"--container-workdir=$PWD"'] if shared else []
    return ["srun", *arguments]
