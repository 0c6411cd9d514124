"""Slurm: a batch script that starts a configuration's Megatron-LM command on all nodes."""

from __future__ import annotations

from hp_tool.formats.megatron_lm import command
from hp_tool.formats.setup import TrainingSetup


def script(setup: TrainingSetup) -> str:
    """An sbatch script; account, partition and time limit are given to sbatch. One torchrun agent a node."""
    per_node = min(setup.cluster.gpus_per_node, setup.cluster.num_gpus)
    body = command(setup).splitlines()
    start = next(i for i, line in enumerate(body) if line.startswith("torchrun"))
    run = "\n".join(body[start:]).replace("torchrun ", "srun torchrun ", 1)
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={_job_name(setup.model.name)}",
            f"#SBATCH --nodes={setup.cluster.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={per_node}",
            "#SBATCH --exclusive",
            *body[1:start],
            "set -euo pipefail",
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_ADDR",
            run,
            "",
        )
    )


def _job_name(name: str) -> str:
    """Letters, digits, dot and dash alone: a model's name is a user's string."""
    return "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "-" for c in name)[:64] or "training"
