"""Read and write Accelerate 1.15's YAML file for `accelerate launch --config_file`."""

import re
from typing import Any

from hp_tool.domain.declared import BATCH_FIELDS, parse_names
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.reading import Reading, key_values
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Evidence, Sign, has_any_key
from hp_tool.formats.source import Source, parse_mapping
from hp_tool.formats.tools import deepspeed
from hp_tool.formats.trainer import accelerate, arguments
from hp_tool.formats.writing import SHAPE_FIELDS, headline, reject_inexpressible, trains_in_16_bits

TOOL = "Accelerate 1.15 (FSDP 2)"
EXPRESSED_FIELDS = BATCH_FIELDS | parse_names("""
    attention optimizer dropout tensor_parallel_size context_parallel_size sequence_parallel
    data_parallel_shard_size context_parallel_communication
""")


def config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of Accelerate's file. It does not contain the batch size.

    Raises:
        UnsupportedError: Accelerate cannot express the setup.
    """
    reject_inexpressible(
        setup, tool=TOOL, expressed=EXPRESSED_FIELDS | SHAPE_FIELDS, runs="torch-fsdp"
    )
    c, w = setup.parallel, setup.workload
    if c.zero_stage < 2:
        raise UnsupportedError(
            f"{TOOL} also shards gradients; set parallel.zero_stage to 2 or 3",
            field="parallel.zero_stage",
        )
    if w.precision not in ("bf16", "fp16", "fp8", "fp32"):
        raise UnsupportedError(
            f"{TOOL} does not support training.precision {w.precision}", field="training.precision"
        )
    if setup.recomputes_by_layer is None:
        raise UnsupportedError(
            f"{TOOL} recomputes whole layers or nothing; set parallel.recompute to none or "
            "per_layer",
            field="parallel.recompute",
        )
    if c.sequence_parallel and c.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"{TOOL} does not shard norms and dropout across tensor-parallel ranks; set "
            "parallel.sequence_parallel to false",
            field="parallel.sequence_parallel",
        )
    return launch_content(setup)


def launch_content(setup: TrainingSetup) -> dict[str, Any]:
    """Return the part of Accelerate's file that configures processes and sharding."""
    c, w = setup.parallel, setup.workload
    shard = c.data_parallel_shard_size or c.data_parallel_size
    sharded = {
        "fsdp_config": {
            "fsdp_version": 2,
            **{f"fsdp_{key}": value for key, value in fsdp_settings(setup).items()},
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": c.data_parallel_size // shard,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": c.tensor_parallel_size,
            "parallelism_config_cp_size": c.context_parallel_size,
            **_context_exchange(setup),
        },
    }
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if c.zero_stage else "MULTI_GPU",
        "mixed_precision": "no"
        if w.precision == "fp32" or trains_in_16_bits(setup)
        else w.precision,
        "num_machines": setup.cluster.num_nodes,
        "num_processes": setup.cluster.num_gpus,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "c10d" if setup.cluster.num_nodes > 1 else "static",
        "same_network": True,
        "use_cpu": False,
        **(sharded if c.zero_stage else {}),
    }


def _context_exchange(setup: TrainingSetup) -> dict[str, str]:
    """Return the context-parallel communication settings; empty without context parallelism."""
    if setup.parallel.context_parallel_size == 1:
        return {}
    kind = setup.strategy.context_parallel_communication
    if kind not in accelerate.EXCHANGES:
        raise UnsupportedError(
            f"{TOOL} does not support parallel.context_parallel_communication {kind}; choose "
            f"{' or '.join(accelerate.EXCHANGES)}",
            field="parallel.context_parallel_communication",
        )
    return {"parallelism_config_cp_comm_strategy": accelerate.EXCHANGES[kind]}


def fsdp_settings(setup: TrainingSetup) -> dict[str, Any]:
    """Return FSDP2 settings under axolotl's names, which lack Accelerate's prefix `fsdp_`."""
    return {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": setup.parallel.zero_stage == 3,
        "activation_checkpointing": setup.recompute.granularity != "none",
        "offload_params": False,
        # If one rank loads the weights for all ranks, quantisation deadlocks (axolotl's own check).
        "cpu_ram_efficient_loading": setup.workload.frozen_precision != "nf4",
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def text(setup: TrainingSetup) -> str:
    """Return Accelerate's file, with a comment about the training script's arguments."""
    import yaml

    w, c = setup.workload, setup.parallel
    head = (
        f"# {TOOL}: {headline(setup)}.\n"
        f"# Tell the training script: sequence length {w.sequence_length}, {c.micro_batch_size} "
        "sequences a device, "
        f"{setup.accumulation_steps} gradient accumulation steps, optimizer {w.optimizer}, dropout "
        f"{w.dropout:g}.\n"
    )
    return head + yaml.safe_dump(config(setup), sort_keys=False)


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of Accelerate's file or of a Trainer's script."""
    content = parse_mapping(source.text)
    if content is None:
        deepspeed.read(source, reading)
        return
    accelerate.read_accelerate(content, text=source.text, reading=reading, spare=source.ignore)


def _is_launch(evidence: Evidence) -> bool:
    launched = re.search(r"accelerate\s+launch", evidence.text) is not None
    return launched and "--config_file" in evidence.text and evidence.files


register(
    Format(
        name="accelerate",
        title="Accelerate",
        signs=(
            Sign(
                place="keys",
                rank=30,
                matches=has_any_key("distributed_type", "compute_environment"),
            ),
            Sign(place="script", rank=60, matches=_is_launch),
        ),
        read=read,
        write=text,
        options=lambda setup: key_values(config(setup)),
        framework="torch-fsdp",
        axes=arguments.AXES,
        fsdp_axes={"zero_stage": (2, 3), "pipeline_parallel_size": 1, "sequence_parallel": False},
        logs=("deepspeed", "trainer"),
        file="accelerate.yaml",
        reads="Accelerate's YAML file, or a launch script of Hugging Face's Trainer or TRL that "
        "uses this file",
        writes="Accelerate's YAML file for FSDP 2",
        checked="Accelerate 1.15's ClusterConfig and ParallelismConfig on 16 to 1,024 processes; "
        "read back by `import`",
    )
)
