"""Read scripts that start a Trainer, with the DeepSpeed and Accelerate files that they name."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from hp_tool.formats.megatron_names import config_file_settings
from hp_tool.formats.reading import (
    Reading,
    Setting,
    as_settings,
    describe_unknown_parts,
    hyphenated,
    parse_flags,
    table,
)
from hp_tool.formats.shell import Script, Word
from hp_tool.formats.source import Source, find_file, find_named_file, parse_keys, parse_mapping
from hp_tool.formats.trainer import accelerate, arguments

_OTHER_TASKS = re.compile(
    r"(?:^|[._])(dpo|kto|orpo|cpo|grpo|ppo|rloo|reward|gkd|bco|prm|rlhf)(?:[._]|$)"
)
"""Matches training programs for preference and reward models."""
_DEEPSPEED_FILE = ("deepspeed", "deepspeed-config", "deepspeed-config-file")


def read_script(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a script that starts a Trainer."""
    launch, script = source.launch(reading)
    words = parse_flags(launch.words, table=table("trainer"), reading=reading)
    words = [
        *config_file_settings(words, script, reading),
        *(word for word in words if word.name != "config"),
    ]
    if (other := _OTHER_TASKS.search(launch.program.lower())) is not None:
        reading.refuse(
            f"{launch.program}: {other[1]} is not supported; only pretraining and "
            "supervised fine-tuning are"
        )
    if launch.program == "trl.scripts.sft" or any(
        word.text.endswith("trl/scripts/sft.py") for word in _launcher_words(script)
    ):
        words += _trl_defaults({word.name for word in words})
    elif any(word.name == "data-split" for word in words):
        words = _chat_arguments(words, reading)
    read_trainer_command(words, script, source, reading)


def read_trainer_command(
    words: list[Setting],
    script: Script,
    source: Source,
    reading: Reading,
    *,
    fsdp: dict[str, Any] | None = None,
) -> None:
    """Read a Trainer's arguments and its launcher: Accelerate, DeepSpeed or torchrun.

    `fsdp` contains the FSDP settings in the Trainer's own arguments.
    """
    config = _find_accelerate_config(script, source, reading)
    started = [word.text for word in _launcher_words(script)]
    options = (
        accelerate.launch_options(started[started.index("accelerate") + 2 :])
        if "accelerate" in started
        else fsdp or {}
    )
    _read_launched_arguments(words, source, script.files, reading, config=config, options=options)


def read_file(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of TRL's YAML file, or of a script that uses one.

    An Accelerate or DeepSpeed file, if available, determines the sharding; otherwise it is DDP.
    """
    if source.mapping is None:
        read_script(source, reading)
        reading.tool = "trl"
        return
    words = as_settings(source.keys(reading), lines=source.text)
    words += _trl_defaults({word.name for word in words})
    config = next(
        (
            text
            for text in source.files.values()
            if "distributed_type" in (parse_mapping(text) or {})
        ),
        None,
    )
    _read_launched_arguments(words, source, source.files, reading, config=config, options={})
    reading.tool = "trl"


def _read_launched_arguments(
    words: list[Setting],
    source: Source,
    files: Mapping[str, str],
    reading: Reading,
    *,
    config: str | None,
    options: dict[str, Any],
) -> None:
    """Read a Trainer's arguments, with the file and options of its launcher.

    `config` is the text of Accelerate's file, `options` are those of `accelerate launch`.
    """
    text = find_deepspeed_file(words, files, reading)
    content = None if text is None else parse_keys(text)
    options = options or _read_trainer_fsdp(words, reading, alone=config is None)
    if config is None and (text is not None or not options):
        num_gpus = reading.num_gpus
        arguments.read_arguments(
            content,
            text=text or "",
            words=words,
            reading=reading,
            num_gpus=num_gpus,
            spare=source.ignore,
        )
        return
    launch = {} if config is None else parse_keys(config)
    for key, value in options.items():
        launch[key] = {**(launch.get(key) or {}), **value} if isinstance(value, dict) else value
    accelerate.read_accelerate(
        launch, text=config or "", reading=reading, words=words, spare=source.ignore
    )


_CHAT_DEFAULTS = {"per-device-train-batch-size": "16", "max-seq-len": "512"}


def _chat_arguments(words: list[Setting], reading: Reading) -> list[Setting]:
    """Return DeepSpeed-Chat's fine-tuning arguments under the Trainer's names."""
    values = {word.name: word.text for word in words}
    if "num-padding-at-beginning" in values or "actor-zero-stage" in values:
        reading.refuse("DeepSpeed-Chat's training on preferences or rewards is not supported")
    if values.get("lora-dim", "0") != "0":
        reading.refuse(
            "--lora_dim: DeepSpeed-Chat's LoRA, which also trains other weights, is not supported"
        )
    dtype = values.get("dtype", "fp16")
    changed = [word for word in words if word.name not in ("dtype", "offload")]
    changed.append(Setting(name=dtype, written=f"dtype {dtype}", values=("true",)))
    if "offload" in values:
        reading.refuse("--offload: the offload of DeepSpeed-Chat's weights is not modelled")
    for name, value in _CHAT_DEFAULTS.items():
        if name not in values:
            written = f"{name.replace('-', '_')} (DeepSpeed-Chat's default)"
            changed.append(Setting(name=name, written=written, values=(value,)))
    return changed


def _trl_defaults(names: Collection[str]) -> Iterator[Setting]:
    """Yield defaults of TRL's own script for arguments that are not set (SFTConfig of 1.16)."""
    for others, name, value in (
        (("activation-checkpointing", "gradient-checkpointing"), "gradient-checkpointing", "true"),
        (("bf16", "fp16"), "bf16", "true"),
        (arguments.LENGTH_OPTIONS, "max-length", "1024"),
        (("loss-type",), "loss-type", "nll"),
        (("dtype", "torch-dtype"), "dtype", "float32"),
    ):
        if not any(other in names for other in others):
            yield Setting(
                name=name, written=f"{name.replace('-', '_')} (TRL's default)", values=(value,)
            )


def find_deepspeed_file(
    words: list[Setting], files: Mapping[str, str], reading: Reading
) -> str | None:
    """Return the text of the DeepSpeed file that the arguments name; None without one."""
    setting = next(
        (word for word in reversed(words) if word.name in _DEEPSPEED_FILE and word.values), None
    )
    if setting is not None and setting.unknown:
        reading.add_unknown_value(setting, "parallel.zero_stage")
        return None
    named = None if setting is None or setting.values[0] == "none" else setting.values[0]
    if named is not None and named.lstrip().startswith("{"):
        return named
    # The command's own arguments take precedence.
    text = None if named is None else find_file(files, named)
    if named is not None and text is None:
        text = deepspeed_preset(named)
    if named is not None and text is None:
        stage = re.search(r"(?:zero|z|stage)[-_]?([0-3])(?!\d)", named)
        why = f"{named}: file not found; pass it with --file {named}"
        reading.add_missing(
            "parallel.zero_stage",
            f"{why}, or add" if stage else why,
            example=stage[1] if stage else None,
        )
    return text


_PRESET_NAMES = re.compile(
    r"(?:zero|.*\bexamples/deepspeed/ds_z|.*\bdeepspeed_configs/zero)([0-3])(?:_bf16|_torch_compile)?"
    r"(_offload|_cpuoffload_all|_cpuoffload_params)?(?:_config)?(?:\.json)?"
)
"""Matches names of the DeepSpeed files that ms-swift, LLaMA-Factory and axolotl include."""


def deepspeed_preset(name: str) -> str | None:
    """Return the DeepSpeed file of this name that a trainer includes, else None."""
    match = _PRESET_NAMES.fullmatch(name)
    if match is None or ("/" not in name and name.endswith(".json")):
        return None
    zero: dict[str, Any] = {"stage": int(match[1])}
    if match[2] and "params" not in match[2]:
        zero["offload_optimizer"] = {"device": "cpu"}
    if match[2] and match[1] == "3":
        zero["offload_param"] = {"device": "cpu"}
    return json.dumps({"zero_optimization": zero})


def _read_trainer_fsdp(words: list[Setting], reading: Reading, *, alone: bool) -> dict[str, Any]:
    """Return the Trainer's own --fsdp settings, if there is no Accelerate file with sharding."""
    fsdp = next(
        (word.text.strip() for word in reversed(words) if word.name == "fsdp" and not word.unknown),
        "",
    )
    if fsdp in ("", "none", "false") or not alone:
        return {}
    return {"distributed_type": "FSDP", "fsdp_config": accelerate.trainer_fsdp(fsdp, reading)}


_CONFIG_FILE_OPTIONS = (
    "--config_file",
    "--config-file",
    "--accelerate_config",
    "--accelerate-config",
)
"""Options of `accelerate launch` and `trl` that name Accelerate's file."""


def _find_accelerate_config(script: Script, source: Source, reading: Reading) -> str | None:
    """Return the text of the file passed to `accelerate launch`; None without one."""
    words = [word for command in script.commands for word in command.words]
    for number, word in enumerate(words):
        option, separator, value = word.text.partition("=")
        if option not in _CONFIG_FILE_OPTIONS or hyphenated(option) in map(
            hyphenated, source.ignore
        ):
            continue
        file = word._replace(text=value) if separator else words[min(number + 1, len(words) - 1)]
        if file.unknown:
            reading.refuse(f"{option} is {describe_unknown_parts(file.unknown)}")
        elif (text := _accelerate_file(script, file.text)) is not None:
            return text
        else:
            reading.refuse(f"{option} {file.text}: file not found; pass it with --file {file.text}")
    return None


def _accelerate_file(script: Script, name: str) -> str | None:
    """Return the text of an Accelerate file, or of one that TRL includes."""
    if (text := find_named_file(script, name)) is not None or (
        included := re.fullmatch(r"(zero|fsdp)([123])|multi_gpu", name)
    ) is None:
        return text
    sections = {
        "zero": ("DEEPSPEED", "deepspeed_config", "zero_stage"),
        "fsdp": ("FSDP", "fsdp_config", "fsdp_version"),
    }
    kind, section, key = sections.get(included[1], ("MULTI_GPU", "deepspeed_config", ""))
    chosen = {section: {key: int(included[2])}} if key else {}
    return yaml.safe_dump(
        {
            "distributed_type": kind,
            "mixed_precision": "bf16",
            "num_processes": 8,
            "num_machines": 1,
            **chosen,
        }
    )


def _launcher_words(script: Script) -> Iterator[Word]:
    return (word for command in script.commands for word in command.words)
