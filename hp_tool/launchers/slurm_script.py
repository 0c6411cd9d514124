"""The batch script of one job: pure, printable, and of use to a person who submits it by hand.

Nothing of a query is in it. The request travels in a file, the environment through sbatch's own, and what remains is the
job's name, numbers, the operator's checked words, and the quoted argv.
"""

from __future__ import annotations

import math
import shlex

from hp_tool.domain.ports import LaunchPlan
from hp_tool.launchers import jobs
from hp_tool.launchers.slurm_folder import CANCEL, CLAIM, ENDED, SLURM_LOG
from hp_tool.launchers.slurm_options import SlurmOptions

SCRIPT = "job.sbatch"
_GRACE_S = 120.0
"""Slurm's own limit is a backstop: it counts minutes, and its end leaves no record of the job's."""
_KILL_AFTER_S = 60

_TEMPLATE = """\
#!/bin/bash
{header}
set -e
# Of all jobs submitted for this folder one runs: where the controller's answer was lost, there may be two.
(set -C; echo "$SLURM_JOB_ID" > {claim}) 2> /dev/null || [ "$(< {claim})" = "$SLURM_JOB_ID" ] || exit 0
# Nothing to do: cancelled before it began, or requeued although it was done.
[ ! -e {cancel} ] && [ ! -e {result} ] || exit 0
rm -f {ended} {rank_results}
started=$(date +%s.%N)
record_end() {{
  printf '{{"exit_code": %d, "started_at": %s, "ended_at": %s}}\\n' "$?" "$started" "$(date +%s.%N)" > "~{ended}"
  mv "~{ended}" {ended}
}}
trap record_end EXIT
# Slurm ends the job: that is no end of its own, and Slurm has the word for it.
trap 'trap - EXIT; exit 143' TERM
{setup}
# torchrun reads these; the batch step runs on the first node, and every node resolves its host's name.
export PET_MASTER_ADDR=$(hostname) PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
timeout --kill-after={kill_after} {timeout_s} {srun} \\
  bash -c 'export PET_NODE_RANK=$SLURM_NODEID; exec "$@" 2>&1' node \\
  {command} \\
  > {log}
"""


def render(options: SlurmOptions, *, plan: LaunchPlan) -> str:
    """The script for `plan`, to be submitted in the job's folder."""
    nodes = jobs.nodes_for(plan.num_gpus, gpus_per_node=options.gpus_per_node, max_nodes=options.max_nodes)
    return _TEMPLATE.format(
        header="\n".join(f"#SBATCH {argument}" for argument in _sbatch(options, plan=plan, nodes=nodes)),
        claim=CLAIM,
        cancel=CANCEL,
        result=jobs.RESULT,
        rank_results="result.rank*.json",
        ended=ENDED,
        setup="\n".join([*(f"module load {module}" for module in options.modules), *options.setup]),
        kill_after=_KILL_AFTER_S,
        timeout_s=f"{plan.timeout_s:g}",
        srun=" ".join(_srun(options, nodes=nodes)),
        command=shlex.join(plan.command),
        log=jobs.LOG,
    )


def _sbatch(options: SlurmOptions, *, plan: LaunchPlan, nodes: int) -> list[str]:
    per_node = plan.num_gpus // nodes
    wall_s = options.time_s if options.time_s is not None else plan.timeout_s + _GRACE_S
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
        f"--output={SLURM_LOG}",
        "--open-mode=truncate",
        *options.sbatch_arguments,
    ]


def _devices(options: SlurmOptions, *, per_node: int) -> list[str]:
    if options.gpu == "cpu":
        return [f"--cpus-per-task={per_node}"]
    gres = "gpu" if options.gres is None else options.gres
    return [f"--gres={gres}:{per_node}"] if gres else []


def _srun(options: SlurmOptions, *, nodes: int) -> list[str]:
    """One task on each node, which starts that node's processes itself and so must not be bound to one core."""
    arguments = [
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        "--mpi=none",
        "--input=none",
    ]
    if options.container is not None:
        mounts = "".join(f",{mount}" for mount in options.container.mounts)
        arguments += [
            f"--container-image={shlex.quote(options.container.image)}",
            f'"--container-mounts=$PWD:$PWD{mounts}"',
            '"--container-workdir=$PWD"',
        ]
    return ["srun", *arguments]
