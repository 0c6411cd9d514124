"""Settings of another tool's configuration, and how each of them is used."""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import Any, Literal, Self

import yaml

from hp_tool.errors import InputError, UnsupportedError

Fate = Literal["read", "ignored", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A setting that determines a field of the query."""

    flag: str
    value: str
    line: int | None
    """Line number in the script or file, from 1; None if unknown."""
    field: str
    """The query field that the setting determines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A setting that does not affect the query, with the reason."""

    flag: str
    reason: str
    line: int | None = None


def set_option(field: str, example: str) -> str:
    """Return the `hp-tool import` option that sets a field."""
    option = {"cluster.gpu": "--gpu", "cluster.num_gpus": "--num-gpus", "model": "--model"}.get(
        field
    )
    return f"--set {field}={example}" if option is None else f"{option} {example}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A field that the query requires and the configuration does not set."""

    field: str
    hint: str
    """How to set the field on the command line, with the value that the configuration suggests, if
    any.
    """
    example: str | None = None
    """Example value, if the hint contains the field's option; empty if the option has no value."""

    def with_example(self, example: str) -> Self:
        """Return the missing field with another example value, also in its hint."""
        hint = self.hint.replace(
            set_option(self.field, self.example or ""), set_option(self.field, example)
        )
        return replace(self, hint=hint, example=example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of a configuration: a flag with its values, or a key and its value."""

    name: str
    """Name as in the tables: with hyphens and without leading dashes."""
    written: str
    values: tuple[str, ...] = ()
    line: int | None = None
    unknown: tuple[str, ...] = ()
    """Parts of the value that are known only at run time."""

    @property
    def text(self) -> str:
        """Return the values of the setting, joined by spaces."""
        return " ".join(self.values)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings by name, with typed access. Absent and null settings have defaults."""

    by_name: Mapping[str, Setting]

    def text(self, name: str, default: str = "") -> str:
        """Return the values of a setting, joined by spaces."""
        setting = self.by_name.get(hyphenated(name))
        return (
            default
            if setting is None or not setting.values or setting.text.lower() in ("null", "none")
            else setting.text
        )

    def whole_number(self, name: str, default: int = 1) -> int:
        """Return the integer value of a setting.

        Raises:
            InputError: The value is not a whole number.
        """
        return parse_whole_number(self.text(name, str(default)), name)

    def is_on(self, name: str, *, default: bool = False) -> bool:
        """Return True if a switch is on.

        Raises:
            InputError: The value is neither true nor false.
        """
        text = self.text(name, str(default))
        if text.lower() not in ("true", "false"):
            raise InputError(f"{name} must be true or false, got {text}", field=name)
        return text.lower() == "true"


_SIZE_FIELDS = {
    "parallel.tensor_parallel_size",
    "parallel.pipeline_parallel_size",
    "parallel.context_parallel_size",
    "parallel.expert_parallel_size",
    "parallel.expert_tensor_parallel_size",
    "parallel.micro_batch_size",
    "model.num_hidden_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.num_experts",
}
"""Fields that are equal to one flag's value. Readers derive other fields from them."""


@dataclass(kw_only=True)
class Reading:
    """The query read from a configuration, and how each setting is used."""

    tool: str
    query: dict[str, Any] = field(default_factory=dict)
    read: list[Read] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Sentences about rejected settings. Duplicates are shown once."""
    num_gpus: int | None = None
    absent: list[str] = field(default_factory=list)
    """Source lines for files that are not available. These files may set undefined variables."""
    hints: dict[str, str] = field(default_factory=dict)
    """Suggested values by query field, for fields that the configuration does not set."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Query values that the caller sets, by dotted path."""

    def refuse(self, why: str) -> None:
        """Record an unsupported setting."""
        self.refused.append(why)

    def ignore(self, setting: Setting, reason: str) -> None:
        """Record a setting that does not affect the query."""
        self.ignored.append(Ignored(flag=setting.written, reason=reason, line=setting.line))

    def note_length_bound(self, flag: str) -> None:
        """Record the assumption that all samples have the maximum length, which `flag` sets."""
        reason = (
            "an upper bound, assumed for each sample: if samples are shorter, set "
            "training.sequence_lengths, or training.sequence_length to their mean"
        )
        self.ignored.append(Ignored(flag=flag, reason=reason))

    def add_missing(self, path: str, why: str, *, example: object = None, after: str = "") -> None:
        """Record a required field that the configuration does not set, unless already recorded.

        The hint consists of `why`, the field's option if there is an example, and `after`.
        """
        if any(missing_field.field == path for missing_field in self.missing):
            return
        shown = None if example is None else str(example)
        hint = why if shown is None else f"{why} {set_option(path, shown)}{after}"
        self.missing.append(Missing(field=path, hint=hint, example=shown))

    def overridden_size(self, path: str) -> str:
        """Return the size that the caller sets for a field; empty if none."""
        size = self.overrides.get(path) if path in _SIZE_FIELDS else None
        return str(size) if isinstance(size, int) else ""

    def add_unknown_value(self, setting: Setting, path: str) -> None:
        """Record a field as missing because its setting has an unknown value."""
        if any(
            path == overridden or path.startswith(f"{overridden}.") for overridden in self.overrides
        ):
            self.ignore(setting, f"its value is unknown, but {path} is set")
            return
        at = f"line {setting.line}: " if setting.line else ""
        why = f"{at}{setting.written} is {describe_unknown_parts(setting.unknown)}; add"
        self.add_missing(
            path, why, example={"cluster.num_gpus": "", "model": "NAME"}.get(path, "...")
        )

    def add_unknown_values(self, settings: Iterable[Setting], fields: Mapping[str, str]) -> None:
        """Record as missing each field in `fields` whose setting has an unknown value."""
        for setting in settings:
            if setting.unknown and setting.name in fields:
                self.add_unknown_value(setting, fields[setting.name])


class ImportRefusedError(UnsupportedError):
    """The configuration has unsupported or missing settings. The message names all of them."""

    def __init__(self, message: str, *, reading: Reading, field: str, code: str) -> None:
        super().__init__(message, field=field, code=code)
        self.reading = reading
        self.details = reading_accounts(reading)


def reading_accounts(reading: Reading) -> dict[str, Any]:
    """Return the settings that were read, ignored and missing, as JSON values."""
    return {
        "read": [asdict(read_setting) for read_setting in reading.read],
        "ignored": [asdict(ignored_setting) for ignored_setting in reading.ignored],
        "missing": [asdict(missing_field) for missing_field in reading.missing],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An entry of a tool's argument table."""

    name: str
    arity: str
    """Number of values, as in argparse's nargs: 0, 1, + or *; ? if the value is optional."""
    fate: Fate
    why: str
    """Query field, or the reason for ignoring or rejecting the argument."""
    harmless: tuple[str, ...] = ()
    """For a rejected argument: values that have no effect and are accepted."""


class Table(dict[str, Argument]):
    """A tool's arguments by name."""

    @functools.cached_property
    def prefixes(self) -> list[str]:
        """Entries that end in *. Each matches all names with its prefix."""
        return [name for name in self if name.endswith("*")]


def read_table_file(name: str) -> str:
    """Return the text of a file in the folder `tables`."""
    folder = resources.files("hp_tool.formats")
    return folder.joinpath(f"tables/{name}").read_text(encoding="utf-8")


@functools.cache
def table(name: str) -> Table:
    """Return the argument table in tables/NAME.yaml.

    In the table, NAME is a switch, `NAME=` has one value, `NAME=+` and `NAME=*` have several, and
    `NAME=?` has an optional value. `NAME=|a|b` is rejected unless its value is a or b.
    """
    content = yaml.safe_load(read_table_file(f"{name}.yaml"))
    arguments = Table()
    for fate in ("read", "ignored", "refused"):
        for why, names in (content.get(fate) or {}).items():
            for entry in names.split():
                flag, separator, rest = entry.partition("=")
                kinds, *harmless = rest.split("|")
                arity = (kinds or "1") if separator else "0"
                arguments[flag] = Argument(
                    name=flag, arity=arity, fate=fate, why=why, harmless=tuple(harmless)
                )
    return arguments


def look_up(name: str, table: Table) -> Argument | None:
    """Return the entry for an argument's name, or for the longest matching prefix."""
    if name in table:
        return table[name]
    prefixes = [beginning for beginning in table.prefixes if f"{name}.".startswith(beginning[:-1])]
    return table[max(prefixes, key=len)] if prefixes else None


MAX_NAMED = 40
"""Maximum number of unsupported settings, and of missing fields, that an error names."""
REQUESTED_BY_USER = "ignored as requested"
_VARIABLE = re.compile(r"\$\{?(\w+)(?:\[.*\])?\}?")


def are_variables(parts: Iterable[str]) -> bool:
    """Return True if all unknown parts are variables, which a missing file may define."""
    return all(_VARIABLE.fullmatch(part.strip()) for part in parts)


def describe_unknown_parts(parts: Iterable[str]) -> str:
    """Return the unknown parts of a word, and the options that supply their values."""
    parts = tuple(parts)
    if not are_variables(parts):
        return f"{', '.join(parts)}, only known at run time"
    innermost = dict.fromkeys(
        _VARIABLE.findall(part)[-1] if "[" not in part else re.findall(r"\$\{?(\w+)", part)[-1]
        for part in parts
    )
    options = " ".join(f"--var {name}=..." for name in innermost)
    return f"{', '.join(parts)}, which nothing sets here ({options})"


def hyphenated(name: str) -> str:
    """Return a flag or key as spelled in tables: with hyphens, without leading dashes."""
    return name.lstrip("-").replace("_", "-")


def sort_settings(
    settings: Iterable[Setting], *, table: Table, reading: Reading, spare: Iterable[str] = ()
) -> dict[str, Setting]:
    """Return the last setting of each name, and record each as read, ignored or rejected.

    A setting with an unknown value is recorded as missing and left out of the result, so that no
    reader falls back to a default. A size in `reading.overrides` replaces an unknown value. `spare`
    contains names to ignore.
    """
    spared = {hyphenated(name) for name in spare}
    last: dict[str, Setting] = {}
    for setting in settings:
        if (before := last.pop(setting.name, None)) is not None:
            flag = " ".join((before.written, *before.values))
            reading.ignored.append(
                Ignored(flag=flag, reason="overridden by a later occurrence", line=before.line)
            )
        last[setting.name] = setting
    for setting in tuple(last.values()):
        argument, value = look_up(setting.name, table), setting.text
        if setting.name in spared:
            reading.ignore(setting, REQUESTED_BY_USER)
        elif any(part in setting.written for part in setting.unknown):
            why = "the flags that it passes are only known at run time; write them out"
            if reading.absent and are_variables(setting.unknown):
                why = (
                    f"it is not set, and {reading.absent[0]} was not found; pass the file with "
                    "--file"
                )
            reading.refuse(f"{setting.written}: {why}")
        elif argument is None and value == "none" and not setting.written.startswith("-"):
            reading.ignore(setting, "null, so the default applies")
        elif argument is None:
            wanted = (
                len(reading.refused) < MAX_NAMED
            )  # The search is slow, so skip it for errors that are not shown.
            near = difflib.get_close_matches(setting.name, table, n=1, cutoff=0.8) if wanted else []
            hint = f" (did you mean {near[0]}?)" if near else ""
            reading.refuse(
                f"{f'{setting.written} {value}'.strip()[:200]} is not known to {reading.tool}{hint}"
            )
        elif (
            argument.fate == "read"
            and setting.unknown
            and (size := reading.overridden_size(argument.why))
        ):
            last[setting.name] = replace(setting, values=(size,), unknown=())
            reading.read.append(
                Read(flag=setting.written, value=size, line=setting.line, field=argument.why)
            )
        elif argument.fate == "read" and setting.unknown:
            reading.add_unknown_value(setting, argument.why)
            del last[setting.name]
        elif argument.fate == "read":
            reading.read.append(
                Read(flag=setting.written, value=value, line=setting.line, field=argument.why)
            )
        elif argument.fate == "ignored" or value in (*argument.harmless, "none"):
            reading.ignore(
                setting, argument.why if argument.fate == "ignored" else "same as omitting it"
            )
        else:
            reading.refused.append(f"{setting.written}: {argument.why}")
    return last


_UNKNOWN_VALUE = re.compile(r"\$\{.+\}|\$\([^)]*\)|\$[A-Za-z_]\w*|\{\{.*?\}\}")
"""Matches unresolved references of OmegaConf, shells and templates."""


def as_settings(mapping: Mapping[str, Any], *, lines: str = "") -> list[Setting]:
    """Return the leaves of a mapping as settings with dotted names."""
    return _leaf_settings(mapping, rows=_line_numbers(lines), prefix="")


def key_values(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves of a mapping by dotted key, as text."""
    return {setting.written: " ".join(setting.values) for setting in as_settings(mapping)}


def _leaf_settings(
    mapping: Mapping[str, Any], *, rows: Mapping[str, int], prefix: str
) -> list[Setting]:
    settings: list[Setting] = []
    for key, value in mapping.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            settings += _leaf_settings(value, rows=rows, prefix=f"{dotted}.")
            continue
        items = value if isinstance(value, list | tuple) else [value]
        texts = tuple(_value_text(item) for item in items)
        unknown = tuple(part for text in texts for part in _UNKNOWN_VALUE.findall(text))
        settings.append(
            Setting(
                name=hyphenated(dotted),
                written=dotted,
                values=texts,
                line=rows.get(str(key)),
                unknown=unknown,
            )
        )
    return settings


def _value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _line_numbers(text: str) -> dict[str, int]:
    """Return the line number of the first occurrence of each key."""
    rows: dict[str, int] = {}
    for number, row in enumerate(text.splitlines(), 1):
        for key in re.findall(r"(?<![\w.-])([\w.-]+)['\"]?\s*[:=]", row.partition("#")[0]):
            rows.setdefault(key, number)
    return rows


def parse_flags(
    words: Iterable[Any], *, table: Mapping[str, Argument], reading: Reading
) -> list[Setting]:
    """Parse flags and their values as argparse does; reject other words."""
    settings: list[Setting] = []
    current: list[Any] = []
    room = 0

    def finish_flag() -> None:
        if current:
            head, *rest = current
            name, separator, value = head.text.partition("=")
            texts = ((value,) if separator else ()) + tuple(word.text for word in rest)
            unknown = tuple(part for word in current for part in word.unknown)
            argument = table.get(hyphenated(name))
            if (
                argument is not None
                and argument.fate == "read"
                and argument.arity in ("1", "+")
                and not (texts or unknown)
            ):
                reading.refuse(
                    f"{name}: requires a value, but none follows"
                    + (f" (line {head.line})" if head.line else "")
                )
            settings.append(
                Setting(
                    name=hyphenated(name),
                    written=name,
                    values=texts,
                    line=head.line or None,
                    unknown=unknown,
                )
            )

    for word in words:
        if re.match(r"--?[A-Za-z]", word.text):
            finish_flag()
            current = [word]
            argument = table.get(hyphenated(word.text.partition("=")[0]))
            arity = argument.arity if argument else "*"
            room = (
                0
                if "=" in word.text
                else {"0": 0, "?": 1, "1": 1}.get(
                    arity, int(arity) if arity.isdecimal() else 1 << 20
                )
            )
        elif room > 0:
            current.append(word)
            room -= 1
        elif word.unknown:
            if not reading.absent and are_variables(word.unknown):
                reading.ignored.append(
                    Ignored(flag=word.text, reason="nothing sets it", line=word.line)
                )
                continue
            finish_flag()
            current = []
            settings.append(
                Setting(
                    name=hyphenated(word.text),
                    written=word.text,
                    line=word.line or None,
                    unknown=word.unknown,
                )
            )
        else:
            reading.refused.append(
                f"{word.text!r}: belongs to no flag" + (f" (line {word.line})" if word.line else "")
            )
    finish_flag()
    return settings


def parse_whole_number(value: Any, name: str) -> int:
    """Parse an integer.

    Raises:
        InputError: The value is not a whole number.
    """
    text = str(value)
    if not re.fullmatch(r"-?\d{1,18}(\.0*)?", text):
        raise InputError(f"{name} must be a whole number, got {text}", field=name)
    return int(float(text)) if "." in text else int(text)


def parse_fraction(value: Any, name: str) -> float:
    """Parse a number from 0 to 1.

    Raises:
        InputError: The value is not a number from 0 to 1.
    """
    text = str(value)
    if not re.fullmatch(r"[01]?\.?\d{0,18}", text) or not text.strip(".") or float(text) > 1.0:
        raise InputError(f"{name} must be a number from 0 to 1, got {text[:40]}", field=name)
    return float(text)
