"""TRL, axolotl and LLaMA-Factory: every option of a random ranking's rows exists in the tool and
stands for the row's own figure, every figure that has a word is written, and a word that no table
here knows fails.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training.problem import resolve_training
from tests.formats import drawn
from tests.formats.test_exported_adapters import settings
from tests.formats.test_only_written import ANY, rows

KEYS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("fine_tuning_keys.json").read_text()
)
FORMATS = ("trl", "axolotl", "llama-factory")
SEEDS = 24
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
RARE: tuple[dict[str, Any], ...] = (
    {},
    {"task": "lora", "lora": {"rank": 16, "dropout": 0.05}},
    {
        "task": "lora",
        "lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]},
        "frozen_precision": "nf4",
    },
    {"task": "sft", "precision": "fp16", "parameter_precision": "fp32"},
    {"task": "sft", "parameter_precision": "fp32"},
    {"optimizer": "sgd", "attention": "unfused"},
)
"""What of a training is set beside a random query; each value is written or refused."""


def absent(wanted: bool, value: Any) -> Any:
    return value if wanted else None


def is_pure(w: TrainingWorkload) -> bool:
    """Whether all weights are trained as they are, in 16 bits."""
    return w.lora is None and (w.parameter_precision or w.precision) == w.precision == "bf16"


def trainer(configuration: Configuration) -> dict[str, Any]:
    """The Trainer's arguments of a row; None where one must not be written."""
    problem, c = resolve_training(configuration.query), configuration.parallel
    w = problem.workload
    per_step = c.micro_batch_size * c.data_parallel_size
    return {
        "model_name_or_path": ANY,
        "per_device_train_batch_size": c.micro_batch_size,
        "gradient_accumulation_steps": w.global_batch_size // per_step,
        "bf16": w.precision == "bf16" and not is_pure(w),
        "fp16": w.precision == "fp16",
        "gradient_checkpointing": c.zero_stage == 0 and c.recompute != "none",
        "optim": {"adam": "adamw_torch_fused", "sgd": "sgd"}[w.optimizer],
    }


def trl(configuration: Configuration) -> dict[str, Any]:
    w = resolve_training(configuration.query).workload
    lora, narrow = w.lora, w.frozen_precision == "nf4"
    assert w.loss == "chunked"
    return trainer(configuration) | {
        "max_length": w.sequence_length,
        "attn_implementation": "sdpa" if w.attention == "flash" else "eager",
        "loss_type": "chunked_nll",
        "dtype": DTYPES[w.precision if is_pure(w) or lora else "fp32"],
        "use_peft": absent(lora is not None, True),
        "lora_r": lora and lora.rank,
        "lora_dropout": lora and lora.dropout,
        "lora_target_modules": lora and list(lora.target_modules or ()),
        "load_in_4bit": absent(narrow, True),
        "bnb_4bit_quant_type": absent(narrow, "nf4"),
        "use_bnb_nested_quant": absent(narrow, True),
        "bnb_4bit_quant_storage": absent(narrow, DTYPES.get(w.precision)),
    }


def llama_factory(configuration: Configuration) -> dict[str, Any]:
    w = resolve_training(configuration.query).workload
    lora, narrow = w.lora, w.frozen_precision == "nf4"
    assert w.loss == "unfused"
    return trainer(configuration) | {
        "stage": "pt" if w.task == "pretrain" else "sft",
        "do_train": True,
        "cutoff_len": w.sequence_length,
        "disable_gradient_checkpointing": not trainer(configuration)["gradient_checkpointing"],
        "flash_attn": "auto" if w.attention == "flash" else "disabled",
        "finetuning_type": "full" if lora is None else "lora",
        "pure_bf16": is_pure(w),
        "dataset": ANY,
        "template": ANY,
        "lora_rank": lora and lora.rank,
        "lora_dropout": lora and lora.dropout,
        "lora_target": lora and ",".join(lora.target_modules or ()),
        "quantization_bit": absent(narrow, 4),
        "quantization_method": absent(narrow, "bnb"),
        "quantization_type": absent(narrow, "nf4"),
        "double_quantization": absent(narrow, True),
    }


def axolotl(configuration: Configuration) -> dict[str, Any]:
    w, c, same = (
        resolve_training(configuration.query).workload,
        configuration.parallel,
        trainer(configuration),
    )
    lora, shard = w.lora, c.data_parallel_shard_size or c.data_parallel_size
    sharded = {
        "dp_shard_size": shard,
        "dp_replicate_size": c.data_parallel_size // shard,
        "fsdp_version": 2,
        "fsdp_config": ANY,
    }
    adapter = {
        "adapter": "qlora" if w.frozen_precision == "nf4" else "lora",
        "load_in_4bit": w.frozen_precision == "nf4",
    }
    names = (
        "adapter",
        "load_in_4bit",
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
    )
    kept = ("gradient_accumulation_steps", "fp16", "gradient_checkpointing")
    return {name: same[name] for name in kept} | {
        "bf16": "full" if is_pure(w) else same["bf16"],
        "base_model": ANY,
        "sequence_len": w.sequence_length,
        "micro_batch_size": c.micro_batch_size,
        "optimizer": same["optim"],
        "attn_implementation": "sdpa" if w.attention == "flash" else "eager",
        "sample_packing": False,
        "pad_to_sequence_len": True,
        **{name: value if c.zero_stage else None for name, value in sharded.items()},
        "datasets": ANY,
        "learning_rate": ANY,
        "lr_scheduler": ANY,
        "num_epochs": ANY,
        "output_dir": ANY,
        **(
            dict.fromkeys(names)
            if lora is None
            else {
                **adapter,
                "lora_r": lora.rank,
                "lora_alpha": ANY,
                "lora_dropout": lora.dropout,
                "lora_target_modules": list(lora.target_modules or ()),
            }
        ),
    }


TABLES = {"trl": trl, "axolotl": axolotl, "llama-factory": llama_factory}


def sharding(text: str, format: str, configuration: Configuration) -> None:
    """Hold how the processes are started and sharded against the row."""
    c, problem = configuration.parallel, resolve_training(configuration.query)
    shard = c.data_parallel_shard_size or c.data_parallel_size
    checkpointed = c.recompute != "none"
    if format == "axolotl" and not c.zero_stage:
        return
    if format == "axolotl":
        own = yaml.safe_load(text)["fsdp_config"]
        assert not own.keys() - set(KEYS["axolotl"])
        assert f"--nnodes {problem.cluster.num_nodes} " in text
    else:
        found = re.search(r"cat > fsdp2.yaml <<'END'\n(.*?)\nEND\n", text, re.DOTALL)
        assert found is not None
        file = yaml.safe_load(found[1])
        assert (file["num_machines"], file["num_processes"]) == (
            problem.cluster.num_nodes,
            problem.cluster.num_gpus,
        )
        w = problem.workload
        mixed = w.precision != "fp32" and not is_pure(w)
        assert file["mixed_precision"] == (w.precision if mixed else "no")
        if not c.zero_stage:
            assert file["distributed_type"] == "MULTI_GPU" and "fsdp_config" not in file
            return
        sizes = {
            name.removeprefix("parallelism_config_"): value
            for name, value in file["parallelism_config"].items()
        }
        assert sizes == {
            "dp_replicate_size": c.data_parallel_size // shard,
            "dp_shard_size": shard,
            "tp_size": 1,
            "cp_size": 1,
        }
        own = {name.removeprefix("fsdp_"): value for name, value in file["fsdp_config"].items()}
        assert file["fsdp_config"]["fsdp_version"] == 2
    assert own["reshard_after_forward"] is (c.zero_stage == 3)
    assert own["activation_checkpointing"] is checkpointed
    assert own["cpu_ram_efficient_loading"] is (problem.workload.frozen_precision != "nf4")
    assert own["offload_params"] is False


def plain(value: Any) -> Any:
    """A flag's words as its value: none for a switch, one, or a list."""
    if not isinstance(value, list):
        return value
    value = [word for word in value if not word.startswith("$")]  # what the user adds
    return True if not value else value[0] if len(value) == 1 else value


def same(written: Any, expected: Any) -> bool:
    if expected is ANY:
        return written is not None
    if isinstance(expected, list):
        return (written if isinstance(written, list) else [written]) == expected
    return written == expected or str(written) == str(expected)


@pytest.mark.parametrize("training", RARE, ids=["", "lora", "qlora", "fp16", "wide", "sgd"])
@pytest.mark.parametrize("format", FORMATS)
def test_each_option_exists_and_is_the_rows_own(format: str, training: dict[str, Any]) -> None:
    written = []
    for seed in range(SEEDS):
        query = drawn.training(seed, format=format)
        query["training"] |= training
        written += rows(query, format=format)
    assert written
    for text, configuration in written:
        options = settings(text, format)
        assert not options.keys() - set(KEYS[format]), "the tool has no such option"
        expected = TABLES[format](configuration)
        values = (
            {name: plain(value) for name, value in options.items()} if format == "trl" else options
        )
        wrong = {
            name: (values.get(name), expected.get(name))
            for name in values.keys() | expected.keys()
            if not same(values.get(name), expected.get(name))
        }
        assert not wrong, f"(written, of the row): {wrong}"
        sharding(text, format, configuration)
