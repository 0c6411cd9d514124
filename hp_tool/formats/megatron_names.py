"""Read configurations whose keys correspond to Megatron's arguments.

These are files of Megatron Bridge and NeMo, --yaml-cfg files, and the argument list that Megatron
prints at the start of a log.
"""

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from hp_tool.errors import InputError
from hp_tool.formats.reading import (
    REQUESTED_BY_USER,
    Reading,
    Setting,
    as_settings,
    hyphenated,
    look_up,
    read_table_file,
    table,
)
from hp_tool.formats.shell import Script
from hp_tool.formats.source import find_named_file, parse_keys
from hp_tool.formats.tools.megatron_lm.arguments import TABLE

_SECTIONS = ("", "model", "train", "ddp", "comm-overlap", "language-model", "model-parallel")
"""File sections with Megatron's own keys; other sections are irrelevant."""
_OFF_VALUES = ("false", "none", "null", "no", "")
PRINTED_ARGUMENTS = re.compile(r"(?<!-)-{4,}[ \t]*(?:[^-\n]{1,80}[ \t])?arguments[ \t]*-{4}")
"""Matches the start of the argument list that Megatron prints."""
_PRINTED_LINE = re.compile(r"(?:^|[\s:\]])(\w+) \.{2,} ?(.*)$")
MAX_PRINTED_LINES = 3_000
"""Maximum number of lines in a printed argument list."""


@functools.cache
def megatron_names(tool: str) -> Mapping[str, str]:
    """Return Megatron's argument for each of the tool's keys.

    A trailing `!` means that the key disables the argument.
    """
    arguments: dict[str, str] = {}
    content = yaml.safe_load(read_table_file(f"{tool}.yaml"))
    for argument, keys in (content.get("as") or {}).items():
        arguments |= dict.fromkeys(keys.split(), argument)
    return arguments


def megatron_argument(key: str, *, tool: str) -> str:
    """Return Megatron's argument for a key of the tool's file; empty if the key has none.

    A trailing `!` means that the key disables the argument.
    """
    arguments_by_key, megatron = megatron_names(tool), table(TABLE)
    section, _, tail = key.rpartition(".")
    name = arguments_by_key.get(key, arguments_by_key.get(tail, key if key in megatron else ""))
    decides = tail in megatron and megatron[tail].fate == "read"
    return tail if not name and section in _SECTIONS and decides else name


def rename_settings(
    settings: Iterable[Setting], *, tool: str, reading: Reading, spare: Iterable[str] = ()
) -> list[Setting]:
    """Return the settings under Megatron's names, and record settings without a Megatron name.

    `spare` contains keys to ignore.
    """
    tool_table, megatron = table(tool), table(TABLE)
    spared = {hyphenated(name) for name in spare}
    passed: list[Setting] = []
    for setting in settings:
        if setting.name in spared:
            reading.ignore(setting, REQUESTED_BY_USER)
            continue
        tail, name = setting.name.rpartition(".")[2], megatron_argument(setting.name, tool=tool)
        argument = None if name else look_up(setting.name, tool_table)
        if argument is None and not name and tail in megatron:
            name = tail
        if argument is not None:
            if argument.fate == "ignored" or setting.text in (*argument.harmless, *_OFF_VALUES):
                reading.ignore(setting, argument.why)
            else:
                reading.refused.append(f"{setting.written} {setting.text}: {argument.why}")
        elif not name:
            reading.refused.append(f"{setting.written} is not known to {reading.tool}")
        else:
            passed += _renamed_argument(setting, name, reading)
    return passed


def _renamed_argument(setting: Setting, name: str, reading: Reading) -> list[Setting]:
    """Return the setting under Megatron's name, in a list that is empty if the setting is off.

    A trailing `!` in `name` means that the key disables the argument.
    """
    argument, absent = table(TABLE).get(name.removesuffix("!")), _is_off(setting)
    if argument is not None and argument.arity == "0":
        if absent == name.endswith("!"):
            return [Setting(name=argument.name, written=setting.written, line=setting.line)]
        reading.ignore(setting, "off, which is the default")
    elif absent:
        reading.ignore(setting, "has no value")
    else:
        return [replace(setting, name=name.removesuffix("!"))]
    return []


def _is_off(setting: Setting) -> bool:
    return setting.text.strip().lower() in _OFF_VALUES


def read_printed_arguments(lines: Iterable[str]) -> tuple[list[Setting], dict[str, str]]:
    """Return the arguments that Megatron printed into a log, and further sizes found there."""
    listed: list[Setting] = []
    facts: dict[str, str] = {}
    inside = False
    for number, line in enumerate(lines, 1):
        text = re.sub(r"\x1b\[[0-9;]*m", "", line[:2_000]).rstrip()
        if match := re.search(r"using world size: (\d+)", text):
            facts["world_size"] = match[1]
        if match := re.search(r"padded vocab \(size: \d+\).*new (?:vocab )?size: (\d+)", text):
            facts["padded_vocab_size"] = match[1]
        if "end of arguments" in text:
            inside = False
        elif PRINTED_ARGUMENTS.search(text):
            inside = True
        elif inside and len(listed) < MAX_PRINTED_LINES and (entry := _PRINTED_LINE.search(text)):
            listed.append(
                Setting(
                    name=hyphenated(entry[1]),
                    written=entry[1],
                    values=_printed_values(entry[2]),
                    line=number,
                )
            )
        if number > 200_000 or ("iteration" in text and "elapsed time" in text and listed):
            break
    world = next(
        (each.values[0] for each in listed if each.name == "world-size" and each.values), None
    )
    return listed, ({"world_size": world} if world else {}) | facts


def _printed_values(text: str) -> tuple[str, ...]:
    if text.startswith(("[", "(")) and len(text) < 10_000:
        try:
            return tuple(str(each) for each in ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError):
            return (text,)
    return (re.sub(r"^(AttnBackend|CudaGraphScope|torch)\.", "", text),)


def printed_flags(listed: list[Setting], *, reading: Reading) -> list[Setting]:
    """Return printed arguments as flags.

    Megatron prints every argument, also defaults, so values that are not supported count as
    defaults.
    """
    arguments_by_key, megatron = megatron_names("printed"), table(TABLE)
    passed: list[Setting] = []
    for setting in listed:
        name = arguments_by_key.get(setting.name, setting.name)
        argument = megatron.get(name.removesuffix("!"))
        off, decides = (
            _is_off(setting),
            argument is not None and (argument.fate == "read" or setting.name in arguments_by_key),
        )
        if argument is not None and (
            (decides or not off) if argument.arity == "0" else (decides and not off)
        ):
            passed += _renamed_argument(setting, name, reading)
        else:
            why = (
                argument.why
                if argument is not None and argument.fate == "ignored"
                else "printed default"
            )
            reading.ignore(setting, why)
    again = {"encoder-num-layers", "encoder-seq-length"}
    if any(each.name == "num-virtual-stages-per-pipeline-rank" for each in passed):
        again.add("num-layers-per-virtual-pipeline-stage")
    return [each for each in passed if each.name not in again]


def config_file_settings(
    words: Iterable[Setting], script: Script, reading: Reading
) -> list[Setting]:
    """Return the arguments in the file that --config names; the command's own take precedence."""
    named = next((word for word in words if word.name == "config" and word.values), None)
    if named is None:
        return []
    text = find_named_file(script, named.values[0])
    if text is None:
        reading.refuse(
            f"{named.written} {named.values[0]}: file not found; pass it with --file "
            f"{named.values[0]}"
        )
        return []
    try:
        content = parse_keys(text)
    except InputError:
        if "$" not in text:
            raise
        reading.refuse(
            f"{named.written} {named.values[0]}: the script writes this file with "
            "values that are only known at run time; pass the written file with --file "
            f"{named.values[0]}"
        )
        return []
    return file_settings(content, text=text)


def file_settings(content: Mapping[str, Any], *, text: str) -> list[Setting]:
    """Return one setting per leaf of a YAML file.

    Raises:
        InputError: The file has more than MAX_PRINTED_LINES settings.
    """
    settings = as_settings(content, lines=text)
    if len(settings) > MAX_PRINTED_LINES:
        raise InputError(
            f"the file has {len(settings):,} settings; the maximum is {MAX_PRINTED_LINES:,}",
            code="too_large",
        )
    return settings
