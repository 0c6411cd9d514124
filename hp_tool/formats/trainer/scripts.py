"""A script that starts a Trainer: its arguments, and the files of DeepSpeed and Accelerate that it
names.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from hp_tool.formats.reading import Reading, Setting, plain, settings_of, table, untold
from hp_tool.formats.renamed import recipe
from hp_tool.formats.shell import Script, Word
from hp_tool.formats.source import Source, beside, file_of, parsed
from hp_tool.formats.trainer import accelerate, arguments

_OTHER_TASKS = re.compile(
    r"(?:^|[._])(dpo|kto|orpo|cpo|grpo|ppo|rloo|reward|gkd|bco|prm|rlhf)(?:[._]|$)"
)
"""Programs of preferences and rewards."""
_DEEPSPEED_FILE = ("deepspeed", "deepspeed-config", "deepspeed-config-file")


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of the script's Trainer."""
    launch, script = source.launch(reading)
    words = settings_of(launch.words, table=table("trainer"), reading=reading)
    words = [*recipe(words, script, reading), *(each for each in words if each.name != "config")]
    if (other := _OTHER_TASKS.search(launch.program.lower())) is not None:
        reading.refuse(
            f"{launch.program}: {other[1]} runs other passes than pretraining and supervised "
            "fine-tuning"
        )
    if launch.program == "trl.scripts.sft" or any(
        each.text.endswith("trl/scripts/sft.py") for each in _words(script)
    ):
        words += _unsaid_by_trl({each.name for each in words})
    text = deepspeed_file(words, script.files, reading)
    content = None if text is None else parsed(text)
    config = _accelerate_config(script, source, reading)
    options = _accelerate_options(words, script, reading, alone=config is None)
    if config is None and (text is not None or not options):
        num_gpus = reading.num_gpus
        arguments.read(
            content,
            text=text or "",
            words=words,
            reading=reading,
            num_gpus=num_gpus,
            spare=source.ignore,
        )
        return
    laid = {} if config is None else parsed(config)
    for key, value in options.items():
        laid[key] = {**(laid.get(key) or {}), **value} if isinstance(value, dict) else value
    accelerate.read(laid, text=config or "", reading=reading, words=words, spare=source.ignore)


def _unsaid_by_trl(names: Collection[str]) -> Iterator[Setting]:
    """Yield what TRL's own script takes where nothing says otherwise (SFTConfig of 1.16)."""
    for others, name, value in (
        (("activation-checkpointing", "gradient-checkpointing"), "gradient-checkpointing", "true"),
        (("bf16", "fp16"), "bf16", "true"),
        (arguments.LENGTHS, "max-length", "1024"),
        (("loss-type",), "loss-type", "nll"),
    ):
        if not any(each in names for each in others):
            yield Setting(
                name=name, written=f"{name.replace('-', '_')} (TRL's default)", values=(value,)
            )


def deepspeed_file(words: list[Setting], files: Mapping[str, str], reading: Reading) -> str | None:
    """Return the text of the DeepSpeed file that a Trainer's arguments name; one that is not at
    hand is noted as missing.
    """
    setting = next(
        (each for each in reversed(words) if each.name in _DEEPSPEED_FILE and each.values), None
    )
    if setting is not None and setting.unknown:
        reading.lack_value(setting, "parallel.zero_stage")
        return None
    named = None if setting is None else setting.values[0]
    text = None if named is None else file_of(files, named)  # the command's own come last, and win
    if named is not None and text is None:
        stage = re.search(r"(?:zero|z|stage)[-_]?([0-3])(?!\d)", named)
        why = f"{named} is not at hand; give it with --file {named}"
        reading.lack(
            "parallel.zero_stage",
            f"{why}, or add" if stage else why,
            example=stage[1] if stage else None,
        )
    return text


def _accelerate_options(
    words: list[Setting], script: Script, reading: Reading, *, alone: bool
) -> dict[str, Any]:
    """Return the options of `accelerate launch`, or the Trainer's own --fsdp where nothing else
    shards (`alone`: no file of Accelerate's does).
    """
    started = [word.text for word in _words(script)]
    options = (
        accelerate.launch_options(started[started.index("accelerate") + 2 :])
        if "accelerate" in started
        else {}
    )
    fsdp = next(
        (each.text.strip() for each in reversed(words) if each.name == "fsdp" and not each.unknown),
        "",
    )  # '' is off
    if fsdp and alone and not options:
        return {"distributed_type": "FSDP", "fsdp_config": accelerate.own_fsdp(fsdp, reading)}
    return options


_CONFIG_FILE = ("--config_file", "--config-file", "--accelerate_config", "--accelerate-config")
"""Options of `accelerate launch` and `trl` that name Accelerate's file."""


def _accelerate_config(script: Script, source: Source, reading: Reading) -> str | None:
    """Return the text of the file that `accelerate launch` is given; None if there is none. Refuses
    one that is not at hand.
    """
    words = [word for command in script.commands for word in command.words]
    for number, word in enumerate(words):
        option, separator, value = word.text.partition("=")
        if option not in _CONFIG_FILE or plain(option) in map(plain, source.ignore):
            continue
        file = word._replace(text=value) if separator else words[min(number + 1, len(words) - 1)]
        if file.unknown:
            reading.refuse(f"{option} is {untold(file.unknown)}")
        elif (text := _accelerate_file(script, file.text)) is not None:
            return text
        else:
            reading.refuse(
                f"{option} {file.text}: the file is not at hand; give it with --file {file.text}"
            )
    return None


def _accelerate_file(script: Script, name: str) -> str | None:
    """Return the text of a file of Accelerate's, or that of one of TRL's by its name; None: not at
    hand.
    """
    if (text := beside(script, name)) is not None or (
        own := re.fullmatch(r"(zero|fsdp)([123])|multi_gpu", name)
    ) is None:
        return text
    sections = {
        "zero": ("DEEPSPEED", "deepspeed_config", "zero_stage"),
        "fsdp": ("FSDP", "fsdp_config", "fsdp_version"),
    }
    kind, section, key = sections.get(own[1], ("MULTI_GPU", "deepspeed_config", ""))
    chosen = {section: {key: int(own[2])}} if key else {}
    return yaml.safe_dump(
        {
            "distributed_type": kind,
            "mixed_precision": "bf16",
            "num_processes": 8,
            "num_machines": 1,
            **chosen,
        }
    )


def _words(script: Script) -> Iterator[Word]:
    return (word for command in script.commands for word in command.words)
