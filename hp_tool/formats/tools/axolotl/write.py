"""Write axolotl's YAML file for DDP or FSDP 2."""

from typing import Any

import yaml

from hp_tool.domain.setups import TrainingSetup
from hp_tool.formats import fine_tuning
from hp_tool.formats.fine_tuning import OPTIMIZERS, adapter_targets, checkpoints_layers, model_path
from hp_tool.formats.scripts import FILL
from hp_tool.formats.tools.accelerate import fsdp_settings
from hp_tool.formats.writing import headline, trains_in_16_bits

TOOL = "axolotl 0.21"


def text(setup: TrainingSetup) -> str:
    """Return axolotl's YAML file, for `axolotl train`.

    Raises:
        UnsupportedError: axolotl cannot express the setup.
    """
    fine_tuning.check_setup(setup, tool=TOOL, loss="unfused")
    head = (
        f"# {TOOL}: {headline(setup)}; axolotl train THIS --launcher torchrun -- --nnodes "
        f"{setup.cluster.num_nodes} "
        f"--nproc-per-node {setup.processes_per_node}\n# {FILL} 1: datasets, learning rate, "
        "schedule and length; output_dir\n"
    )
    return head + yaml.safe_dump(config(setup), sort_keys=False)


def config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of axolotl's file."""
    w, c = setup.workload, setup.parallel
    shard = c.data_parallel_shard_size or c.data_parallel_size
    sharded = {
        "dp_shard_size": shard,
        "dp_replicate_size": c.data_parallel_size // shard,
        "fsdp_version": 2,
        "fsdp_config": fsdp_settings(setup),
    }
    content: dict[str, Any] = {
        "base_model": model_path(setup),
        "sequence_len": w.sequence_length,
        "micro_batch_size": c.micro_batch_size,
        "gradient_accumulation_steps": setup.accumulation_steps,
        "bf16": "full" if trains_in_16_bits(setup) else w.precision == "bf16",
        "fp16": w.precision == "fp16",
        "optimizer": OPTIMIZERS[w.optimizer],
        "attn_implementation": "sdpa" if w.attention == "flash" else "eager",
        "sample_packing": False,
        "pad_to_sequence_len": True,
        "gradient_checkpointing": checkpoints_layers(setup),
        **(sharded if c.zero_stage else {}),
        "datasets": [
            {
                "path": "mhenrichsen/alpaca_2k_test",
                "type": "completion" if w.task == "pretrain" else "alpaca",
            }
        ],
        "learning_rate": 2e-4 if w.lora is not None else 2e-5,
        "lr_scheduler": "cosine",
        "num_epochs": 1,
        "output_dir": "./out",
    }
    if w.lora is not None:
        content |= {
            "adapter": "qlora" if w.frozen_precision == "nf4" else "lora",
            "load_in_4bit": w.frozen_precision == "nf4",  # nf4 with doubly quantised scales
            "lora_r": w.lora.rank,
            "lora_alpha": 2 * w.lora.rank,
            "lora_dropout": w.lora.dropout,
            "lora_target_modules": list(adapter_targets(setup, tool=TOOL)),
        }
    return content
