"""Fine-tuning over torch FSDP 2, in full or with LoRA: TRL, LLaMA-Factory and axolotl, in the versions named."""

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from hp_tool.domain.workload import CrossEntropy
from hp_tool.errors import UnsupportedError
from hp_tool.formats import accelerate
from hp_tool.formats.megatron_lm.scripts import FILL
from hp_tool.formats.setup import SHAPE, TrainingSetup, Values, headline, one_word, option_words, refuse_unsaid

TRL, LLAMA_FACTORY, AXOLOTL = "TRL 1.16", "LLaMA-Factory 0.9.5", "axolotl 0.19"
SAID = {
    "sequence_length", "global_batch_size", "precision", "attention", "optimizer", "micro_batch_size", "recompute",
    "zero_stage", "data_parallel_shard_size", "task", "lora", "frozen_precision", "cross_entropy",
}  # fmt: skip
LOSSES: dict[str, CrossEntropy] = {"trl": "chunked"}
"""Ways to compute the loss that tools have no switch for, by format; others compute it unfused."""
OPTIMIZERS = {"adam": "adamw_torch_fused", "sgd": "sgd"}
"""Names of the Trainer's `optim`."""
CONFIG, ARGUMENTS = "fsdp2.yaml", "sft.yaml"
"""Files that the scripts write."""


def trl(setup: TrainingSetup) -> str:
    """Return a script that writes Accelerate's file and starts `trl.scripts.sft`. Raises UnsupportedError."""
    _check(setup, tool=TRL, loss=LOSSES["trl"])
    return _script(setup, tool=TRL, program="-m trl.scripts.sft", options=option_words(trl_options(setup)))


def trl_options(setup: TrainingSetup) -> Values:
    """Return arguments of trl.scripts.sft: SFTConfig's, ModelConfig's and the Trainer's."""
    w = setup.workload
    options: dict[str, Any] = {f"--{name}": str(value) for name, value in _trainer(setup).items()}
    options |= {"--max_length": w.sequence_length, "--attn_implementation": "sdpa" if w.attention == "flash" else "eager"}
    options["--loss_type"] = "chunked_nll"  # in 1.16 as nll, which earlier releases compute at once
    options["--dtype"] = "float32" if w.lora is None or w.precision == "fp32" else _DTYPES[w.precision]
    if w.lora is not None:
        options |= {
            "--use_peft": True,
            "--lora_r": w.lora.rank,
            "--lora_dropout": str(w.lora.dropout),
            "--lora_target_modules": list(targets(setup, tool=TRL)),
        }
        if w.frozen_precision == "nf4":
            options |= {
                "--load_in_4bit": True,
                "--bnb_4bit_quant_type": "nf4",
                "--use_bnb_nested_quant": True,
                "--bnb_4bit_quant_storage": _DTYPES[w.precision],  # FSDP shards tensors of one type
            }
    return options


def llama_factory(setup: TrainingSetup) -> str:
    """Return a script that writes Accelerate's and LLaMA-Factory's file, and starts `src/train.py` of a checkout."""
    _check(setup, tool=LLAMA_FACTORY, loss="unfused")
    files = {ARGUMENTS: llama_factory_config(setup)}
    return _script(setup, tool=LLAMA_FACTORY, program=f"src/train.py {ARGUMENTS}", files=files)


def llama_factory_config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of LLaMA-Factory's file; data and template are the user's."""
    w = setup.workload
    content: dict[str, Any] = {
        **_trainer(setup),
        "stage": "pt" if w.task == "pretrain" else "sft",
        "do_train": True,
        "cutoff_len": w.sequence_length,
        "disable_gradient_checkpointing": True,  # FSDP's own, of Accelerate's file
        "flash_attn": "auto" if w.attention == "flash" else "disabled",
        "finetuning_type": "full" if w.lora is None else "lora",
        "dataset": "alpaca_en_demo",
        "template": "default",
    }
    if w.lora is not None:
        content |= {"lora_rank": w.lora.rank, "lora_dropout": w.lora.dropout}
        content["lora_target"] = ",".join(targets(setup, tool=LLAMA_FACTORY))
        if w.frozen_precision == "nf4":
            content |= {"quantization_bit": 4, "quantization_method": "bnb", "quantization_type": "nf4"}
            content["double_quantization"] = True
    return content


def axolotl(setup: TrainingSetup) -> str:
    """Return axolotl's YAML file, for `axolotl train`. Raises UnsupportedError for what it cannot say."""
    _check(setup, tool=AXOLOTL, loss="unfused")
    per_node = min(setup.cluster.gpus_per_node, setup.cluster.num_gpus)
    head = (
        f"# {AXOLOTL}: {headline(setup)}; axolotl train THIS --launcher torchrun -- --nnodes {setup.cluster.num_nodes} "
        f"--nproc-per-node {per_node}\n# {FILL} 1: datasets, learning rate, schedule and length; output_dir\n"
    )
    return head + yaml.safe_dump(axolotl_config(setup), sort_keys=False)


def axolotl_config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of axolotl's file."""
    w, c = setup.workload, setup.parallel
    shard = c.data_parallel_shard_size or c.data_parallel_size
    content: dict[str, Any] = {
        "base_model": _model(setup),
        "sequence_len": w.sequence_length,
        "micro_batch_size": c.micro_batch_size,
        "gradient_accumulation_steps": setup.accumulation_steps,
        "bf16": w.precision == "bf16",
        "fp16": w.precision == "fp16",
        "optimizer": OPTIMIZERS[w.optimizer],
        "attn_implementation": "sdpa" if w.attention == "flash" else "eager",
        "sample_packing": False,
        "pad_to_sequence_len": True,
        "gradient_checkpointing": False,  # FSDP's own, below
        "dp_shard_size": shard,
        "dp_replicate_size": c.data_parallel_size // shard,
        "fsdp_version": 2,
        "fsdp_config": {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": c.zero_stage == 3,
            "activation_checkpointing": setup.recompute.granularity != "none",
            "offload_params": False,
            "cpu_ram_efficient_loading": loads_once(setup),
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "completion" if w.task == "pretrain" else "alpaca"}],
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
            "lora_target_modules": list(targets(setup, tool=AXOLOTL)),
        }
    return content


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _check(setup: TrainingSetup, *, tool: str, loss: str) -> None:
    """Raise UnsupportedError for what the tool has no word for, or would run otherwise than predicted."""
    refuse_unsaid(setup, tool=tool, said=SAID | SHAPE, runs="torch-fsdp")
    w = setup.workload
    if w.loss != loss:
        raise UnsupportedError(
            f"{tool} computes the loss {loss}; set training.cross_entropy: {loss}", field="training.cross_entropy"
        )
    if setup.recompute.granularity not in ("none", "full", "per_layer"):
        raise UnsupportedError(f"{tool} checkpoints whole layers: none or per_layer", field="parallel.recompute")
    if w.precision not in _DTYPES or w.optimizer not in OPTIMIZERS:
        raise UnsupportedError(f"{tool} trains in bf16, fp16 or fp32, with adam or sgd", field="training.precision")
    if w.frozen_precision not in (None, "nf4", w.precision):
        raise UnsupportedError(
            f"{tool} keeps frozen weights in {w.precision} or nf4, not {w.frozen_precision}", field="training.frozen_precision"
        )
    if w.lora is not None:
        targets(setup, tool=tool)


def targets(setup: TrainingSetup, *, tool: str) -> tuple[str, ...]:
    """Return the matrices with adapters in Hugging Face's names. Raises UnsupportedError for fused ones, and for experts."""
    assert setup.workload.lora is not None  # asked for by the caller
    names = setup.workload.lora.target_modules or ()
    fused = [name for name in names if name.startswith("linear_")]
    if fused or not names:
        raise UnsupportedError(
            f"{tool} names matrices as Hugging Face does, and has no adapter on {', '.join(fused) or 'fused matrices'}; set "
            "training.lora.target_modules, such as [q_proj, v_proj]",
            field="training.lora.target_modules",
        )
    if setup.model.num_experts:
        raise UnsupportedError(
            f"{tool} gives experts adapters of their own, where one for each rank's was predicted; choose nemo",
            field="training.lora",
        )
    return names


def loads_once(setup: TrainingSetup) -> bool:
    """Return whether one rank loads the weights for all; quantising on that rank alone deadlocks (axolotl's own check)."""
    return setup.workload.frozen_precision != "nf4"


def _trainer(setup: TrainingSetup) -> dict[str, Any]:
    """Return arguments of Hugging Face's Trainer."""
    w = setup.workload
    return {
        "model_name_or_path": _model(setup),
        "per_device_train_batch_size": setup.parallel.micro_batch_size,
        "gradient_accumulation_steps": setup.accumulation_steps,
        "bf16": w.precision == "bf16",
        "fp16": w.precision == "fp16",
        "gradient_checkpointing": False,  # FSDP's own, of Accelerate's file
        "optim": OPTIMIZERS[w.optimizer],
    }


def _model(setup: TrainingSetup) -> str:
    return setup.model_path or one_word(setup.model.name)


def _script(
    setup: TrainingSetup,
    *,
    tool: str,
    program: str,
    options: Mapping[str, list[str]] | None = None,
    files: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Return a script that writes Accelerate's file, and `files` beside it, and launches the program."""
    lines = [" ".join((name, *map(shlex.quote, words))) for name, words in (options or {}).items()]
    launch = f"accelerate launch --config_file {CONFIG}"
    if setup.cluster.num_nodes > 1:
        launch += (
            ' --machine_rank "${NODE_RANK:?set it to 0, 1, ...}" --main_process_ip "${MASTER_ADDR:?set it to the first node}"'
        )
    started = accelerate.content(setup)
    started["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = loads_once(setup)
    written = {CONFIG: started, **(files or {})}
    yours = "--dataset_name trl-lib/Capybara --learning_rate 2e-4 --output_dir out" if options else "output_dir=out"
    here = [line for name, each in written.items() for line in _heredoc(name, each)]
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"# {tool}: {headline(setup)}.",
            f"# {FILL} 1: your data, learning rate, schedule and length, checkpoints",
            *here,
            "YOURS=(",
            f"    # {FILL} 1",
            f"    {yours}",
            ")",
            " \\\n    ".join((f"{launch} {program}", *lines, '"${YOURS[@]}"', '"$@"')),
            "",
        )
    )


def _heredoc(name: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    return (f"cat > {name} <<'END'", *yaml.safe_dump(dict(content), sort_keys=False).splitlines(), "END")
