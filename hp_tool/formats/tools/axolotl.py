"""Read and write axolotl 0.21's YAML file, by way of Hugging Face Trainer arguments."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from hp_tool.domain.setups import TrainingSetup
from hp_tool.formats import fine_tuning
from hp_tool.formats.fine_tuning import OPTIMIZERS, adapter_targets, checkpoints_layers, model_path
from hp_tool.formats.reading import (
    Reading,
    Setting,
    as_settings,
    parse_whole_number,
    sort_settings,
    table,
)
from hp_tool.formats.registry import Format, register
from hp_tool.formats.scripts import FILL
from hp_tool.formats.signs import Sign, has_any_key, matches_pattern
from hp_tool.formats.source import Source, parse_keys
from hp_tool.formats.tools.accelerate import fsdp_settings
from hp_tool.formats.trainer import accelerate, arguments
from hp_tool.formats.trainer.scripts import find_deepspeed_file
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
            "load_in_4bit": w.frozen_precision == "nf4",  # nf4 with double quantisation
            "lora_r": w.lora.rank,
            "lora_alpha": 2 * w.lora.rank,
            "lora_dropout": w.lora.dropout,
            "lora_target_modules": list(adapter_targets(setup, tool=TOOL)),
        }
    return content


_ARGUMENTS = {
    "base-model": "model-name-or-path",
    "sequence-len": "max-length",
    "micro-batch-size": "per-device-train-batch-size",
    "optimizer": "optim",
    "sample-packing": "packing",
    "pad-to-sequence-len": "pad-to-max-length",
    **{
        name: name
        for name in (
            "gradient-accumulation-steps",
            "bf16",
            "fp16",
            "gradient-checkpointing",
            "attn-implementation",
            "lora-r",
            "lora-dropout",
            "load-in-4bit",
            "load-in-8bit",
            "deepspeed",
        )
    },
}
"""Trainer arguments that are equivalent to axolotl's keys."""
_DEFAULTS = {
    "micro_batch_size": "per-device-train-batch-size",
    "gradient_accumulation_steps": "gradient-accumulation-steps",
}
"""Keys with the default 1, and the equivalent Trainer arguments."""
_IGNORED_PLUGINS = ("LigerPlugin", "KernelsPlugin", "CutCrossEntropyPlugin")
"""Plugins whose effects are controlled by separate keys."""
_ADAPTERS = ("lora", "qlora")


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of axolotl's file.

    Raises:
        InputError: The file is invalid.
    """
    content = source.keys(reading)
    plugins = content.get("plugins") or []
    for name in (str(each) for each in (plugins if isinstance(plugins, list) else [plugins])):
        if not name.endswith(_IGNORED_PLUGINS):
            reading.refuse(f"plugins {name}: not supported")
    sharded, fsdp = content.pop("fsdp_config", None), content.get("fsdp")
    leaves = [
        setting
        for setting in as_settings(content, lines=source.text)
        if setting.name != "lora-target-modules"
    ]
    words = [
        replace(leaf, name=_ARGUMENTS[leaf.name]) for leaf in leaves if leaf.name in _ARGUMENTS
    ]
    settings = sort_settings(
        (leaf for leaf in leaves if leaf.name not in _ARGUMENTS),
        table=table("axolotl"),
        reading=reading,
        spare=source.ignore,
    )
    texts = {word.name: word.text.lower() for word in (*words, *settings.values())}
    words = [
        *(word for word in words if word.name not in ("bf16", "gradient-checkpointing")),
        *_precision_settings(texts, reading),
    ]
    words += [
        _setting(name, f"{key} (axolotl's default)", "1")
        for key, name in _DEFAULTS.items()
        if name not in texts
    ]
    words += [
        *_checkpointing_settings(texts, reading),
        *_loss_settings(texts, str(plugins)),
        *_fusion_settings(texts),
        *_attention_settings(texts),
        *_adapter_settings(content, texts, reading),
    ]
    degrees = {
        name: _degree(settings, name)
        for name in ("dp-shard-size", "dp-replicate-size", "tensor-parallel-size")
    }
    if reading.num_gpus is None and degrees["dp-shard-size"]:
        reading.num_gpus = (
            degrees["dp-shard-size"]
            * (degrees["dp-replicate-size"] or 1)
            * (degrees["tensor-parallel-size"] or 1)
        )
    if sharded or fsdp:
        launch = _accelerate_content(sharded or {}, fsdp, texts, degrees, reading)
        accelerate.read_accelerate(
            launch, text="", reading=reading, words=words, spare=source.ignore
        )
        reading.tool = "axolotl"
        return
    if any(size > 1 for size in degrees.values()):
        reading.refuse(
            "dp_shard_size, dp_replicate_size and tensor_parallel_size require fsdp_config"
        )
    text = find_deepspeed_file(words, source.files, reading)
    content_of = None if text is None else parse_keys(text)
    arguments.read_arguments(
        content_of,
        text=text or "",
        words=words,
        reading=reading,
        num_gpus=reading.num_gpus,
        spare=source.ignore,
    )


def _degree(settings: Mapping[str, Setting], name: str) -> int:
    """Return a parallel size; 0 if the file does not set it."""
    setting = settings.get(name)
    return (
        0
        if setting is None or setting.text in ("", "null")
        else parse_whole_number(setting.text, name.replace("-", "_"))
    )


def _setting(name: str, written: str, *values: str) -> Setting:
    return Setting(name=name, written=written, values=values)


def _precision_settings(texts: Mapping[str, str], reading: Reading) -> list[Setting]:
    """Return the Trainer's precision arguments. `bf16: auto` counts as true."""
    bf16 = texts.get("bf16", "false" if texts.get("fp16") == "true" else "auto")
    if bf16 not in ("true", "auto", "false", "full"):
        reading.refuse(f"bf16 {bf16} is not supported; supported: true, false, auto, full")
    kind = (
        "bfloat16" if bf16 != "false" else "float16" if texts.get("fp16") == "true" else "float32"
    )
    return [
        _setting("bf16", "bf16", "false" if bf16 in ("false", "full") else "true"),
        _setting("torch-dtype", "bf16", kind),  # Precision of the loaded weights.
    ]


def _checkpointing_settings(texts: Mapping[str, str], reading: Reading) -> list[Setting]:
    kind = texts.get("gradient-checkpointing", "false")
    if kind not in ("true", "false", "null", ""):
        reading.refuse(f"gradient_checkpointing {kind}: offloading of checkpoints is not supported")
    return [
        _setting("gradient-checkpointing", "gradient_checkpointing", str(kind == "true").lower())
    ]


def _loss_settings(texts: Mapping[str, str], plugins: str) -> list[Setting]:
    """Return a chunked loss if a kernel never materialises all logits."""
    names = ("chunked-cross-entropy", "liger-fused-linear-cross-entropy", "cut-cross-entropy")
    on = [name for name in names if texts.get(name) == "true"]
    if "CutCrossEntropyPlugin" in plugins and texts.get("cut-cross-entropy") != "false":
        on.append("plugins")
    return [_setting("loss-type", name.replace("-", "_"), "chunked_nll") for name in on[:1]]


def _fusion_settings(texts: Mapping[str, str]) -> list[Setting]:
    """Return torch_compile if it is on, or if Liger fuses norms and activations."""
    activation = "true" in (texts.get("liger-glu-activation"), texts.get("liger-swiglu"))
    liger = activation and texts.get("liger-rms-norm") == "true"
    if liger or texts.get("torch-compile", "false") not in ("false", "null", ""):
        return [_setting("torch-compile", "liger_rms_norm" if liger else "torch_compile", "true")]
    return []


def _attention_settings(texts: Mapping[str, str]) -> list[Setting]:
    return (
        [_setting("attn-implementation", "eager_attention", "eager")]
        if texts.get("eager-attention") == "true"
        else []
    )


def _adapter_settings(
    content: Mapping[str, Any], texts: Mapping[str, str], reading: Reading
) -> list[Setting]:
    """Return the Trainer's arguments for LoRA adapters."""
    kind = texts.get("adapter", "")
    if kind in ("", "none", "null"):
        return []
    if kind not in _ADAPTERS:
        reading.refuse(f"adapter {kind} is not supported; supported: {', '.join(_ADAPTERS)}")
    targets = content.get("lora_target_modules") or []
    targets = [targets] if isinstance(targets, str) else [str(target) for target in targets]
    if texts.get("lora-target-linear") == "true":
        targets = ["all-linear"]
    words = [
        _setting("lora", "adapter", "true"),
        _setting("lora-target-modules", "lora_target_modules", *(targets or ["q_proj", "v_proj"])),
    ]
    if "lora-r" not in texts:
        reading.add_missing("training.lora", "the rank lora_r is not set; add", example="...")
    if texts.get("load-in-4bit") == "true":
        words.append(_setting("use-bnb-nested-quant", "load_in_4bit", "true"))
    return words


def _accelerate_content(
    sharded: Mapping[str, Any],
    fsdp: Any,
    texts: Mapping[str, str],
    degrees: Mapping[str, int],
    reading: Reading,
) -> dict[str, Any]:
    """Return fsdp_config, or the older list `fsdp`, as Accelerate's settings."""
    keys = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in sharded.items()}
    version = texts.get("fsdp-version") or str(keys.pop("fsdp_version", "1"))
    if fsdp:
        keys |= accelerate.trainer_fsdp(
            " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp), reading
        )
    split = {
        f"parallelism_config_{short}_size": degrees[name] or 1
        for short, name in (
            ("tp", "tensor-parallel-size"),
            ("dp_replicate", "dp-replicate-size"),
            ("dp_shard", "dp-shard-size"),
        )
    }
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": version, **keys},
        **({"parallelism_config": split} if max(degrees.values()) > 1 else {}),
    }


register(
    Format(
        name="axolotl",
        title="Axolotl",
        signs=(
            Sign(place="keys", rank=50, matches=has_any_key("base_model")),
            Sign(
                place="script",
                rank=12,
                matches=matches_pattern(r"(?m)^[^#\n]*(?<![/\w-])axolotl(\.cli|\s+train)"),
                refused="a command of Axolotl (import the YAML file that it names)",
            ),
        ),
        logs=("trainer",),
        read=read,
        write=text,
        framework="hf-trainer",
        axes=fine_tuning.AXES,
        trained_weights="fp32",
        reads="axolotl's YAML file for FSDP, or with `--file ds.json` for DeepSpeed",
        writes="axolotl's YAML file for FSDP 2: full fine-tuning, LoRA or QLoRA",
        checked="the fields of axolotl 0.21's schemas; read back by `import`",
    )
)
