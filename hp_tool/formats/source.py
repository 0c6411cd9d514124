"""A configuration to import, with its environment, files and log."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hp_tool.catalog import documents
from hp_tool.errors import InputError
from hp_tool.formats.interpolation import resolve_references
from hp_tool.formats.launch import Launch, read_launch, world_size
from hp_tool.formats.reading import Ignored, Reading, Setting, hyphenated
from hp_tool.formats.shell import Script

MAX_YAML = 400_000
_ARGUMENT_LISTS = re.compile(
    r"(?m)^[ \t]*(?:export[ \t]+)?(\w*(?:ARGS|OPTIONS|FLAGS|CONFIG)\w*)\+?="
)
"""Matches assignments of variables that hold argument lists, by their names."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A configuration to import, with its environment, files and log."""

    text: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment of a script; 1, 2, ... are its arguments."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files that the configuration sources or names, by the name used there."""
    ignore: Sequence[str] = ()
    """Flags and keys to ignore."""
    log: Sequence[str] = ()
    """Lines of the run's log, which supplies missing settings."""
    num_gpus: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that a manifest sets for a server's container."""
    unset: Sequence[str] = ()
    """Environment variables whose values the manifest takes from elsewhere."""
    is_pool: bool = False
    """True if the server belongs to a prefill or decode pool."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Query values that the caller sets, by dotted path."""
    vocabulary: Callable[[Mapping[str, Setting]], str] = lambda settings: ""
    """Returns a tokenizer's vocabulary size as digits; empty if unknown."""
    layers_of: Callable[[str], int | None] = lambda name: None
    """Returns a model's number of layers; None if unknown."""
    num_experts_of: Callable[[str], int | None] = lambda name: None
    named: Callable[[str], str] = lambda name: ""
    """Returns the catalogue model for a tool's model name, such as llama3_1_8b; empty if unknown.
    """
    positions_of: Callable[[str], int | None] = lambda name: None
    """Returns a model's maximum number of positions; None if unlimited or unknown."""
    precision_of: Callable[[str], str] = lambda name: "bf16"
    """Returns the precision of a model's published weights; bf16 if unknown."""

    @functools.cached_property
    def mapping(self) -> dict[str, Any] | None:
        """The mapping in a JSON or YAML text; None for a script.

        Raises:
            InputError: The JSON is invalid.
        """
        return (
            parse_keys(self.text)
            if self.text.lstrip().startswith("{")
            else parse_mapping(self.text)
        )

    def launch(self, reading: Reading) -> tuple[Launch, Script]:
        """Return the script's training or serving command, and the script.

        Raises:
            InputError: The script has no such command.
        """
        launch, script = read_launch(
            self.text, reading=reading, variables=dict(self.variables), files=dict(self.files)
        )
        if launch is None:
            ends = next(
                (
                    f" (line {note.line}: {note.reason})"
                    for note in script.notes
                    if "would end" in note.reason
                ),
                "",
            )
            sets = dict.fromkeys(_ARGUMENT_LISTS.findall(self.text))
            if sets and not script.commands:
                raise InputError(
                    f"the script only sets arguments ({', '.join(list(sets)[:4])}); import the "
                    "script that sources it, and pass this one with --file",
                    field="command",
                )
            raise InputError(
                f"no training or serving command found{ends}. Supported: python, "
                "torchrun, srun, deepspeed, accelerate, vllm and sglang. Pass sourced "
                "files with --file and the script's arguments with --var 1=...",
                field="command",
            )
        reading.num_gpus = reading.num_gpus or world_size(launch, script, reading=reading)
        for word in launch.launchers[:1]:
            reading.ignored.append(
                Ignored(flag=word, reason="starts the processes", line=launch.line)
            )
        return launch, script

    def keys(self, reading: Reading) -> dict[str, Any]:
        """Return the mapping in a file, or the merged files of a command, with references resolved.

        Later files override earlier ones.

        Raises:
            InputError: A file is missing or invalid.
        """
        content = self.mapping
        if content is None:
            content = {}
            launch, script = self.launch(reading)
            for name in (
                word.text for word in launch.words if word.text.endswith((".yml", ".yaml", ".json"))
            ):
                text = find_named_file(script, name)
                if text is None:
                    raise InputError(
                        f"{name}: file not found; pass it with --file",
                        field="command",
                        code="missing_field",
                    )
                content |= parse_keys(text)
        content = resolve_references(content, variables=self.variables)
        names = {hyphenated(str(key)): (str(key), str(value)) for key, value in content.items()}
        settings = {
            name: Setting(name=name, written=key, values=(value,))
            for name, (key, value) in names.items()
        }
        if size := self.vocabulary(settings):
            reading.hints["model.vocab_size"] = size
        return content


def find_named_file(script: Script, name: str) -> str | None:
    """Return the text of a file that a script writes or names; None if not available."""
    return find_file(script.files, name)


def find_file(files: Mapping[str, str], name: str) -> str | None:
    """Return the text of a file, by path or base name; None if not available."""
    path = PurePosixPath(name)
    return next((files[each] for each in (name, str(path), path.name) if each in files), None)


def parse_mapping(text: str) -> dict[str, Any] | None:
    """Return the mapping in a YAML text; None for other text, such as a shell script."""
    first = next(
        (row for row in text.splitlines() if row.strip() and not row.lstrip().startswith("#")), ""
    )
    if (
        len(text) > MAX_YAML
        or text.startswith("#!")
        or not re.match(r"(---|[\w\"'.-]+[ \t]*:([ \t]|$))", first)
    ):
        return None
    try:
        return documents.parse(text, origin=Path("configuration.yaml"))
    except InputError:
        return None


def parse_keys(text: str) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML text.

    Raises:
        InputError: The text is neither JSON nor YAML.
    """
    try:
        return documents.parse(text, origin=Path("deepspeed.json"))
    except InputError:  # YAML in braces may have comments, unlike JSON.
        return documents.parse(text, origin=Path("configuration.yaml"))
