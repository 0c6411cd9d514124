"""Read Megatron-LM's arguments from a launch script or a log."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from hp_tool.errors import UnsupportedError
from hp_tool.formats.launch import Launch
from hp_tool.formats.megatron_names import printed_flags, read_printed_arguments
from hp_tool.formats.reading import (
    Ignored,
    Reading,
    Setting,
    parse_flags,
    parse_whole_number,
    table,
)
from hp_tool.formats.shell import Script
from hp_tool.formats.source import Source, find_named_file, parse_keys
from hp_tool.formats.tools.megatron_lm.arguments import TABLE
from hp_tool.formats.tools.megatron_lm.read import OTHER_PROGRAMS, read_arguments


def read_source(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a script, or of a log that begins with arguments."""
    from_log, facts = read_printed_arguments(source.log)
    listed, own = (
        read_printed_arguments(source.text.splitlines())
        if "arguments ---" in source.text
        else ([], {})
    )
    if listed:
        facts = {**facts, **own}
        settings = printed_flags(listed, reading=reading)
        if reading.num_gpus is None and facts.get("world_size", "").isdecimal():
            reading.num_gpus = parse_whole_number(facts["world_size"], "world_size")
    else:
        launch, script = source.launch(reading)
        _check_program(launch)
        settings = parse_flags(launch.words, table=table(TABLE), reading=reading)
        if {"mamba", "hybrid"} & _program_words(launch) and all(
            setting.name != "is-hybrid-model" for setting in settings
        ):
            settings.append(Setting(name="is-hybrid-model", written=launch.program))
        _add_deepspeed_file(settings, script, reading)
    if from_log:
        names = {setting.name for setting in settings if not setting.unknown}
        more = [
            flag
            for flag in printed_flags(from_log, reading=Reading(tool=reading.tool))
            if flag.name not in names
        ]
        settings = [setting for setting in settings if not setting.unknown] + more
    if "padded_vocab_size" in facts and all(
        setting.name not in ("padded-vocab-size", "vocab-size") for setting in settings
    ):
        settings.append(
            Setting(
                name="padded-vocab-size",
                written="padded vocab",
                values=(facts["padded_vocab_size"],),
            )
        )
    if size := source.vocabulary({setting.name: setting for setting in settings}):
        reading.hints["model.vocab_size"] = size
    read_arguments(settings, reading=reading, num_gpus=reading.num_gpus, spare=source.ignore)


def _program_words(launch: Launch) -> set[str]:
    """Return the words in the file name of a training program."""
    name = PurePosixPath(launch.program).name.lower()
    return (
        set(re.split(r"[_./-]", name))
        if name.startswith(("pretrain", "train", "finetune")) or "." in name
        else set()
    )


def _check_program(launch: Launch) -> None:
    parts = _program_words(launch)
    for part, what in OTHER_PROGRAMS.items():
        if part in parts:
            raise UnsupportedError(
                f"{launch.program} trains {what}; only decoders (pretrain_gpt.py) are supported",
                field="command",
            )


def _add_deepspeed_file(settings: list[Setting], script: Script, reading: Reading) -> None:
    """Add ZeRO stage and precision from Megatron-DeepSpeed's file, which override the flags."""
    named = next(
        (setting for setting in settings if setting.name == "deepspeed-config" and setting.values),
        None,
    )
    if named is None:
        return
    text = find_named_file(script, named.values[0])
    if text is None:
        reason = "not found; pass it with --file if it sets a ZeRO stage or a precision"
        reading.ignored.append(Ignored(flag=named.values[0], reason=reason, line=named.line))
        return
    content = parse_keys(text)
    zero = content.get("zero_optimization")
    if isinstance(zero, Mapping) and "stage" in zero:
        written = f"{named.values[0]}: zero_optimization.stage"
        settings.append(Setting(name="zero-stage", written=written, values=(str(zero["stage"]),)))
    kinds = {"fp16": ("fp16",), "bf16": ("bf16", "bfloat16")}
    for kind, keys in kinds.items():
        if any(
            isinstance(section := content.get(key), Mapping) and section.get("enabled") is True
            for key in keys
        ):
            settings[:] = [setting for setting in settings if setting.name not in kinds]
            settings.append(Setting(name=kind, written=f"{named.values[0]}: {kind}.enabled"))
