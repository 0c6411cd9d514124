"""Write fine-tuning jobs with DDP or FSDP2 for TRL, LLaMA-Factory and axolotl."""

import math
from collections.abc import Mapping
from typing import Any

import yaml

from hp_tool.domain.declared import BATCH_FIELDS, LORA_FIELDS, parse_names
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.reading import Reading
from hp_tool.formats.scripts import (
    FILL,
    multiline_command,
    option_lines,
    required_variable,
    script_text,
)
from hp_tool.formats.tools import accelerate
from hp_tool.formats.writing import (
    DTYPES,
    SHAPE_FIELDS,
    headline,
    model_name_argument,
    reject_inexpressible,
    trains_in_16_bits,
)

EXPRESSED_FIELDS = (
    BATCH_FIELDS
    | LORA_FIELDS
    | parse_names(
        "attention optimizer data_parallel_shard_size task frozen_precision cross_entropy"
    )
)
AXES: dict[str, Any] = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"), 1),
    "recompute": ("none", "full"),
    "zero_stage": (0, 2, 3),
}
"""Values of the `parallel` axes that these tools support."""
OPTIMIZERS = {"adam": "adamw_torch_fused", "sgd": "sgd"}
"""The Trainer's `optim` for each value of `training.optimizer`."""
CONFIG_FILE = "fsdp2.yaml"
"""Name of the Accelerate configuration file that the script writes."""


def check_setup(setup: TrainingSetup, *, tool: str, loss: str, chooses_width: bool = False) -> None:
    """Check that the tool supports the setup and would run it as predicted.

    `chooses_width`: the tool has an option to load the weights in fp32 under LoRA.

    Raises:
        UnsupportedError: The tool cannot express the setup.
    """
    w = setup.workload
    width: set[str] = set()
    if w.lora is None or chooses_width:
        width |= (
            {"parameter_precision"} if w.parameter_precision in (w.precision, "fp32") else set()
        )
    if trains_in_16_bits(setup):
        width |= {"gradient_precision", "optimizer_precision", "master_precision"}
    reject_inexpressible(
        setup, tool=tool, expressed=EXPRESSED_FIELDS | SHAPE_FIELDS | width, runs="hf-trainer"
    )
    if trains_in_16_bits(setup) and w.precision != "bf16":
        raise UnsupportedError(
            f"{tool} supports training without fp32 master weights only in bf16, not "
            f"{w.precision}; set training.parameter_precision: fp32",
            field="training.parameter_precision",
        )
    if w.loss != loss:
        raise UnsupportedError(
            f"{tool} uses the {loss} loss; set training.cross_entropy: {loss}",
            field="training.cross_entropy",
        )
    if setup.recomputes_by_layer is None:
        raise UnsupportedError(
            f"{tool} recomputes whole layers or nothing; set parallel.recompute to none or full",
            field="parallel.recompute",
        )
    if w.precision not in DTYPES or w.optimizer not in OPTIMIZERS:
        raise UnsupportedError(
            f"{tool} supports bf16, fp16 and fp32 with adam or sgd; change training.precision "
            "or training.optimizer",
            field="training.precision",
        )
    if w.frozen_precision not in (None, "nf4", w.precision):
        raise UnsupportedError(
            f"{tool} stores frozen weights in {w.precision} or nf4, not {w.frozen_precision}",
            field="training.frozen_precision",
        )
    if w.lora is not None:
        adapter_targets(setup, tool=tool)


def adapter_targets(setup: TrainingSetup, *, tool: str) -> tuple[str, ...]:
    """Return the Hugging Face module names with LoRA adapters.

    Raises:
        UnsupportedError: Adapters are on fused matrices or experts.
    """
    assert setup.workload.lora is not None  # Checked by the caller.
    names = setup.workload.lora.target_modules or ()
    fused = [name for name in names if name.startswith("linear_")]
    if fused or not names:
        raise UnsupportedError(
            f"{tool} uses Hugging Face's matrix names and cannot put an adapter on "
            f"{', '.join(fused) or 'fused matrices'}; set training.lora.target_modules, "
            "such as [q_proj, v_proj]",
            field="training.lora.target_modules",
        )
    if setup.model.num_experts:
        raise UnsupportedError(
            f"{tool} uses one adapter per expert, but the estimate assumes one per rank; export to "
            "nemo instead",
            field="training.lora",
        )
    return names


def trainer_arguments(setup: TrainingSetup) -> dict[str, Any]:
    """Return the Hugging Face Trainer's arguments."""
    w = setup.workload
    return {
        "model_name_or_path": model_path(setup),
        "per_device_train_batch_size": setup.parallel.micro_batch_size,
        "gradient_accumulation_steps": setup.accumulation_steps,
        "bf16": w.precision == "bf16" and not trains_in_16_bits(setup),
        "fp16": w.precision == "fp16",
        "gradient_checkpointing": checkpoints_layers(setup),
        "optim": OPTIMIZERS[w.optimizer],
    }


def checkpoints_layers(setup: TrainingSetup) -> bool:
    """Return True if the Trainer enables activation checkpointing.

    Under FSDP, Accelerate's file enables it instead.
    """
    return not setup.parallel.zero_stage and setup.recompute.granularity != "none"


def model_path(setup: TrainingSetup) -> str:
    return setup.model_path or model_name_argument(setup.model.name)


def launch_script(
    setup: TrainingSetup,
    *,
    tool: str,
    program: str,
    options: Mapping[str, list[str]] | None = None,
    files: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Return a script that writes Accelerate's file and `files`, then launches the program."""
    launch = f"accelerate launch --config_file {CONFIG_FILE}"
    if setup.cluster.num_nodes > 1:
        rank, address = (
            required_variable("NODE_RANK", "set it to 0, 1, ..."),
            required_variable("MASTER_ADDR", "set it to the first node"),
        )
        launch += f' --machine_rank "{rank}" --main_process_ip "{address}"'
    written = {CONFIG_FILE: accelerate.launch_content(setup), **(files or {})}
    yours = (
        "--dataset_name trl-lib/Capybara --learning_rate 2e-4 --output_dir out"
        if options
        else "output_dir=out"
    )
    heredocs = [line for name, each in written.items() for line in _heredoc(name, each)]
    return script_text(
        (
            f"# {tool}: {headline(setup)}.",
            f"# {FILL} 1: your data, learning rate, schedule and length, checkpoints",
            *heredocs,
            "YOURS=(",
            f"    # {FILL} 1",
            f"    {yours}",
            ")",
            multiline_command(f"{launch} {program}", *option_lines(options or {}), '"${YOURS[@]}"'),
        )
    )


def _heredoc(name: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"cat > {name} <<'END'",
        *yaml.safe_dump(dict(content), sort_keys=False).splitlines(),
        "END",
    )


def optimizer_fields(name: str, optimizers: Mapping[str, str], reading: Reading) -> dict[str, str]:
    """Return `training.optimizer` for an optimizer name; reject unknown names."""
    if name not in optimizers:
        reading.refuse(
            f"optimizer {name or '(none)'} is not supported; supported: {', '.join(optimizers)}"
        )
    return {} if optimizers.get(name, "adam") == "adam" else {"optimizer": optimizers[name]}


def complete_layout(
    parallel: dict[str, Any],
    training: dict[str, Any],
    *,
    reading: Reading,
    accumulation_steps: int = 1,
    global_batch_size: int = 0,
    shard: int = 0,
    copies: int = 1,
) -> None:
    """Add the global batch size and the FSDP shard group to the query of an FSDP2 trainer.

    `copies` is the number of shard groups (HSDP replicas).
    """
    axes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    replicas = (reading.num_gpus or 0) // math.prod(parallel.get(axis, 1) for axis in axes)
    training["global_batch_size"] = (
        global_batch_size or max(replicas, 1) * accumulation_steps * parallel["micro_batch_size"]
    )
    if copies > 1:
        parallel["data_parallel_shard_size"] = shard if shard > 0 else max(replicas // copies, 1)
