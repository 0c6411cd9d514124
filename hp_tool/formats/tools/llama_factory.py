"""Read LLaMA-Factory 0.9.5's YAML file, and write a script that runs it with FSDP2."""

from dataclasses import replace
from typing import Any

from hp_tool.catalog import documents
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import InputError
from hp_tool.formats import fine_tuning
from hp_tool.formats.fine_tuning import adapter_targets, checkpoints_layers, trainer_arguments
from hp_tool.formats.launch import Launch
from hp_tool.formats.reading import Reading, Setting, as_settings
from hp_tool.formats.registry import Format, register
from hp_tool.formats.shell import Script
from hp_tool.formats.signs import Evidence, Sign, matches_pattern
from hp_tool.formats.source import Source, find_named_file, parse_keys
from hp_tool.formats.trainer import accelerate, arguments
from hp_tool.formats.trainer.scripts import find_deepspeed_file, read_trainer_command
from hp_tool.formats.writing import trains_in_16_bits

TOOL = "LLaMA-Factory 0.9.5"
ARGUMENTS = "sft.yaml"
"""Name of the LLaMA-Factory file that the script writes."""


def text(setup: TrainingSetup) -> str:
    """Return a script that writes both configuration files and starts `src/train.py`."""
    fine_tuning.check_setup(setup, tool=TOOL, loss="unfused")
    files = {ARGUMENTS: config(setup)}
    return fine_tuning.launch_script(
        setup, tool=TOOL, program=f"src/train.py {ARGUMENTS}", files=files
    )


def config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of LLaMA-Factory's file. The user fills in data and template."""
    w = setup.workload
    content: dict[str, Any] = {
        **trainer_arguments(setup),
        "stage": "pt" if w.task == "pretrain" else "sft",
        "do_train": True,
        "cutoff_len": w.sequence_length,
        "disable_gradient_checkpointing": not checkpoints_layers(setup),
        "flash_attn": "auto" if w.attention == "flash" else "disabled",
        "finetuning_type": "full" if w.lora is None else "lora",
        "pure_bf16": trains_in_16_bits(setup),
        "dataset": "alpaca_en_demo",
        "template": "default",
    }
    if w.lora is not None:
        content |= {"lora_rank": w.lora.rank, "lora_dropout": w.lora.dropout}
        content["lora_target"] = ",".join(adapter_targets(setup, tool=TOOL))
        if w.frozen_precision == "nf4":
            content |= {
                "quantization_bit": 4,
                "quantization_method": "bnb",
                "quantization_type": "nf4",
            }
            content["double_quantization"] = True
    return content


_DEFAULTS = {"finetuning-type": "lora", "cutoff-len": "2048"}
_STAGES = ("pt", "sft")


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a LLaMA-Factory file, or of a script that uses one.

    The training uses DeepSpeed if the file names a DeepSpeed file, FSDP if a file enables it, and
    DDP otherwise.

    Raises:
        InputError: The file is invalid or not available.
    """
    launched = None if source.mapping is not None else source.launch(reading)
    file = source.keys(reading) if launched is None else _launched_file(*launched)
    settings = as_settings(file, lines=source.text)
    values = {setting.name: setting.text for setting in settings}
    reading.add_unknown_values(settings, {"disable-gradient-checkpointing": "parallel.recompute"})
    for name, value in _DEFAULTS.items():
        if name not in values:
            settings.append(
                Setting(
                    name=name,
                    written=f"{name.replace('-', '_')} (LLaMA-Factory's default)",
                    values=(value,),
                )
            )
    wide = values.get("pure-bf16", "false") != "true"  # Trained weights are cast to fp32.
    settings.append(
        Setting(name="dtype", written="pure_bf16", values=("float32" if wide else "bfloat16",))
    )
    checkpointed = values.get("disable-gradient-checkpointing", "false") != "true"
    settings = [
        replace(setting, name="use-liger-kernel")
        if setting.name == "enable-liger-kernel"
        else setting
        for setting in settings
        if setting.name not in ("disable-gradient-checkpointing", "gradient-checkpointing")
    ]
    name = "disable_gradient_checkpointing"
    settings.append(
        Setting(name="gradient-checkpointing", written=name, values=(str(checkpointed).lower(),))
    )
    if (stage := values.get("stage", "sft")) not in _STAGES:
        reading.refuse(f"stage {stage} is not supported; supported: {', '.join(_STAGES)}")
    if (kind := values.get("finetuning-type", "lora")) not in ("lora", "full"):
        reading.refuse(f"finetuning_type {kind} is not supported; supported: lora, full")
    if launched is not None:
        read_trainer_command(settings, launched[1], source, reading)
        reading.tool = "llama-factory"
        return
    if (fsdp := values.get("fsdp", "")) not in ("", "null", "false"):
        launch = {"distributed_type": "FSDP", "fsdp_config": accelerate.trainer_fsdp(fsdp, reading)}
        accelerate.read_accelerate(
            launch, text="", reading=reading, words=settings, spare=source.ignore
        )
        reading.tool = "llama-factory"
        return
    text = find_deepspeed_file(settings, source.files, reading)
    num_gpus = reading.num_gpus
    arguments.read_arguments(
        None if text is None else parse_keys(text),
        text=text or "",
        words=settings,
        reading=reading,
        num_gpus=num_gpus,
        spare=source.ignore,
    )


def _launched_file(launch: Launch, script: Script) -> dict[str, Any]:
    """Return the file that a command names, updated with the command's KEY=VALUE words.

    Raises:
        InputError: A file is not available, or a word is unknown.
    """
    arguments = (word.text for word in launch.words if "=" in word.text or not word.unknown)
    name, *words = [text for text in arguments if text] or [""]
    text = find_named_file(script, name)
    if text is None:
        raise InputError(
            f"{name or 'the file of arguments'}: file not found; pass it with --file",
            field="command",
            code="missing_field",
        )
    content = parse_keys(text)
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or key.startswith("-"):
            raise InputError(
                f"{word}: expected KEY=VALUE after LLaMA-Factory's file", field="command"
            )
        content[key] = documents.load_yaml(value)
    return content


def _is_its_file(evidence: Evidence) -> bool:
    return bool(evidence.keys & {"finetuning_type", "cutoff_len"}) or {
        "model_name_or_path",
        "template",
    } <= set(evidence.keys)


register(
    Format(
        name="llama-factory",
        title="LLaMA-Factory",
        signs=(
            Sign(place="keys", rank=51, matches=_is_its_file),
            Sign(
                place="script",
                rank=13,
                matches=matches_pattern(r"\bllamafactory-cli\b|\bsrc/train\.py\s+\S+\.ya?ml\b"),
            ),
        ),
        logs=("trainer",),
        read=read,
        write=text,
        framework="hf-trainer",
        axes=fine_tuning.AXES,
        trained_weights="fp32",
        reads="LLaMA-Factory's YAML file, or a launch script that uses this file; with `--file "
        "ds.json` if the file names a DeepSpeed file",
        writes="a script that writes the files of Accelerate and LLaMA-Factory and starts "
        "`src/train.py`: full fine-tuning, LoRA or QLoRA",
        checked="the fields of LLaMA-Factory 0.9.5's and transformers' classes; read back by "
        "`import`",
    )
)
