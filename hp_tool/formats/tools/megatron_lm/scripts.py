"""Write a Megatron-LM configuration as a shell or sbatch script or a Kubernetes manifest."""

import functools
from typing import Any

import yaml

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.network import domains
from hp_tool.domain.parallel import divisors
from hp_tool.domain.setups import TrainingSetup
from hp_tool.domain.switches import device_connections
from hp_tool.formats.reading import read_table_file
from hp_tool.formats.scripts import (
    FILL,
    fill_in_comment,
    multiline_command,
    option_lines,
    required_variable,
    script_text,
)
from hp_tool.formats.tools.megatron_lm import words
from hp_tool.formats.tools.megatron_lm.hybrid import program
from hp_tool.formats.tools.megatron_lm.write import flags, loop_flags
from hp_tool.formats.writing import Values, headline, option_words

PORT = 29_500
_BLACKWELL_GPUS = ("b200", "b300", "gb200", "gb300", "rtx-5090", "rtx-pro-6000")
_USER_FLAGS: tuple[tuple[str, Values], ...] = (
    (
        "your data and tokenizer (mock data starts at once)",
        {"mock-data": True, "tokenizer-type": "NullTokenizer", "split": "99,1,0"},
    ),
    (
        "your learning rate, schedule and length",
        {
            "lr": "3e-4",
            "min-lr": "3e-5",
            "lr-decay-style": "cosine",
            "lr-warmup-fraction": "0.01",
            "train-iters": 1000,
            "weight-decay": "0.1",
            "clip-grad": "1.0",
            "adam-beta1": "0.9",
            "adam-beta2": "0.95",
        },
    ),
    ("your checkpoints (--save FOLDER --load FOLDER)", {"save-interval": 1000}),
    ("your logs", {"log-interval": 10, "log-throughput": True, "eval-iters": 0}),
)
"""Flags that the user must replace, with values that allow a run to start."""


@functools.cache
def _published_flags() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = yaml.safe_load(read_table_file("trained_with.yaml"))
    return content


def published_flags(setup: TrainingSetup) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Return the model's published flags that do not affect estimates, and the unknown ones."""
    m, name = setup.model, setup.model.name
    published = _published_flags().get(
        max(
            (flag for flag in _published_flags() if name.startswith(flag)),
            key=len,
            default="",
        ),
        {},
    )
    values: Values = {
        flag: f"{value:g}" if isinstance(value, float) else value
        for flag, value in published.items()
        if (m.positions == "rotary" or not flag.startswith(("rotary", "rope", "use-rope")))
        and (m.num_experts or not flag.startswith("moe-"))
    }
    wanted = ["norm-epsilon"] + ["rotary-base"] * (m.positions == "rotary")
    wanted += ["moe-router-load-balancing-type", "moe-aux-loss-coeff"] * bool(m.num_experts)
    lacking = tuple(
        flag
        for flag in wanted
        if flag not in published
        and not (flag == "moe-aux-loss-coeff" and "moe-router-load-balancing-type" in published)
    )
    return option_words(values), lacking


def environment(setup: TrainingSetup) -> dict[str, str]:
    """Return the environment variables that Megatron requires or that affect its speed."""
    if setup.parallel.zero_stage >= 2:  # Megatron FSDP rejects the value 1.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    connections = device_connections(workload=setup.workload, parallel=setup.parallel)
    if connections is None or (
        connections == "1" and setup.cluster.gpu.name.startswith(_BLACKWELL_GPUS)
    ):
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": connections}


def all_flags(setup: TrainingSetup) -> dict[str, list[str]]:
    """Return the flags of the configuration, and the model's published flags."""
    return flags(setup) | loop_flags(setup) | published_flags(setup)[0]


def _fill_in_lines(setup: TrainingSetup) -> tuple[list[str], list[str]]:
    """Return comments that list the values to fill in, and the lines of their flag array."""
    lacking = published_flags(setup)[1]
    parts = list(_USER_FLAGS)
    if lacking:
        parts.append(
            (f"what the model is trained with: {', '.join(f'--{flag}' for flag in lacking)}", {})
        )
    array = ["YOURS=("]
    for number, (what, values) in enumerate(parts, 1):
        array += [
            f"    {line}"
            for line in (
                f"# {FILL} {number}: {what}",
                *option_lines(option_words(values), prefix="--"),
            )
        ]
    return fill_in_comment(what for what, _ in parts), [*array, ")"]


def torchrun_script(setup: TrainingSetup, *, script: str | None = None) -> str:
    """Return a shell script that starts Megatron-LM with torchrun and its own arguments."""
    nodes = setup.cluster.num_nodes
    launch = f"torchrun --nnodes {nodes} --nproc-per-node {setup.processes_per_node}"
    if nodes > 1:
        address = required_variable("MASTER_ADDR", "set it to the first node")
        launch += f' --rdzv-backend c10d --rdzv-endpoint "{address}:${{MASTER_PORT:-{PORT}}}"'
    head, yours = _fill_in_lines(setup)
    return script_text(
        (
            f"# {words.TOOL}: {headline(setup)}.",
            *head,
            *(f"export {name}={value}" for name, value in environment(setup).items()),
            *yours,
            multiline_command(
                f"{launch} {script or program(setup)}",
                *option_lines(all_flags(setup), prefix="--"),
                '"${YOURS[@]}"',
            ),
        )
    )


def _segment_option(setup: TrainingSetup) -> list[str]:
    """Return the #SBATCH line for the nodes per rack, if an NVLink domain spans several nodes."""
    cluster = setup.cluster
    domain = domains(Candidates.alone(setup.parallel), cluster=cluster)
    if not domain.of_several_nodes:
        return []
    together = max(int(domain.together) // cluster.gpus_per_node, 1)
    sizes = divisors(cluster.num_nodes, limit=int(domain.size) // cluster.gpus_per_node)
    return [
        "#SBATCH "
        f"--segment={max((size for size in sizes if size % together == 0), default=max(sizes))}"
    ]


def _job_name(setup: TrainingSetup) -> str:
    """Return the model's name reduced to letters, digits, dots and dashes."""
    return (
        "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "-" for c in setup.model.name)[
            :64
        ]
        or "training"
    )


def slurm_script(setup: TrainingSetup) -> str:
    """Return an sbatch script with one torchrun agent per node.

    Account, partition and time limit are passed to sbatch.
    """
    body = torchrun_script(setup).splitlines()
    start = next(i for i, line in enumerate(body) if line.startswith("torchrun"))
    run = "\n".join(body[start:]).replace("torchrun ", "srun torchrun ", 1)
    return script_text(
        (
            f"#SBATCH --job-name={_job_name(setup)}",
            f"#SBATCH --nodes={setup.cluster.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={setup.processes_per_node}",
            "#SBATCH --exclusive",
            *_segment_option(setup),
            *body[1:start],
            "set -euo pipefail",
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_ADDR",
            run,
        )
    )


def kubernetes_manifest(setup: TrainingSetup) -> str:
    """Return a manifest with an Indexed Job (one pod per node) and a headless Service."""
    name = _job_name(setup).lower().replace(".", "-").strip("-")[:40] or "training"
    nodes = setup.cluster.num_nodes
    script = "".join(line + "\n" for line in torchrun_script(setup).splitlines())
    labels = {"app": name}
    variables = [
        {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
        {"name": "MASTER_PORT", "value": str(PORT)},
    ]
    container = {
        "name": "train",
        "image": "FILL-IN/image-with-megatron-lm",
        "workingDir": "/workspace/megatron-lm",
        "command": ["bash", "-c", script],
        "env": variables,
        "resources": {"limits": {"nvidia.com/gpu": setup.processes_per_node}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 (in the container)
    }
    pod = {
        "restartPolicy": "Never",
        "subdomain": name,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": labels},
    }
    head = (
        f"# {words.TOOL}: {headline(setup)}. Fill in: the image (FILL-IN below), volumes of your "
        "data, and in the script "
        "what its own list names.\n"
    )
    return head + yaml.safe_dump_all([service, job], sort_keys=False, width=10_000)
