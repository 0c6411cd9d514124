"""A configuration to read, with what is at hand beside it."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hp_tool.catalog import documents
from hp_tool.errors import InputError
from hp_tool.formats.interpolation import interpolated
from hp_tool.formats.launch import Launch, launch_of, world_size
from hp_tool.formats.reading import Ignored, Reading, Setting, plain
from hp_tool.formats.shell import Script

MAX_YAML = 400_000


@dataclass(frozen=True, kw_only=True)
class Source:
    """A configuration and what is at hand beside it."""

    text: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment of a script; 1, 2, ... are its arguments."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files that it sources or names, by the name it gives them."""
    ignore: Sequence[str] = ()
    """Flags and keys to pass over."""
    log: Sequence[str] = ()
    """Lines of the run's log, which completes what the configuration does not say."""
    num_gpus: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that a manifest gives the container of a server."""
    unset: Sequence[str] = ()
    """Variables that it takes from elsewhere."""
    is_pool: bool = False
    """Whether the server prefills for others, or decodes what others prefilled."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the query, by dotted path, that the caller gives beside the configuration."""
    vocabulary: Callable[[Mapping[str, Setting]], str] = lambda settings: ""
    """What is known of a tokenizer's vocabulary: digits, or an empty text."""
    layers_of: Callable[[str], int | None] = lambda name: None
    """The number of layers of a model; None if nobody knows it."""
    num_experts_of: Callable[[str], int | None] = lambda name: None
    named: Callable[[str], str] = lambda name: ""
    """The catalogue's model that a tool calls by `name`, such as llama3_1_8b; or an empty text."""
    positions_of: Callable[[str], int | None] = lambda name: None
    """Tokens that a model has positions for; None if it has no known limit."""
    precision_of: Callable[[str], str] = lambda name: "bf16"
    """The precision of a model's published weights; bf16 where nobody knows of any."""

    @functools.cached_property
    def mapping(self) -> dict[str, Any] | None:
        """What a file of keys holds; None of a script. Raises InputError for JSON that is none."""
        return parsed(self.text) if self.text.lstrip().startswith("{") else mapping_of(self.text)

    def launch(self, reading: Reading) -> tuple[Launch, Script]:
        """Return the command of a script that trains or serves, and the script. Raises InputError
        where there is none.
        """
        launch, script = launch_of(
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
            raise InputError(
                f"the script starts no command that trains or serves{ends}: python, torchrun, "
                "srun, deepspeed, accelerate, "
                "vllm and sglang lines are looked for; give what it sources with --file and its "
                "arguments with --var 1=...",
                field="command",
            )
        reading.num_gpus = reading.num_gpus or world_size(launch, script, reading=reading)
        for word in launch.launchers[:1]:
            reading.ignored.append(
                Ignored(flag=word, reason="starts the processes", line=launch.line)
            )
        return launch, script

    def keys(self, reading: Reading) -> dict[str, Any]:
        """Return a file of keys with its references filled in, or the files that a script's command
        names, the later laid over the earlier. Raises InputError.
        """
        content = self.mapping
        if content is None:
            content = {}
            launch, script = self.launch(reading)
            for name in (
                word.text for word in launch.words if word.text.endswith((".yml", ".yaml", ".json"))
            ):
                text = beside(script, name)
                if text is None:
                    raise InputError(
                        f"{name} is not at hand; give it with --file",
                        field="command",
                        code="missing_field",
                    )
                content |= parsed(text)
        content = interpolated(content, variables=self.variables)
        names = {plain(str(key)): (str(key), str(value)) for key, value in content.items()}
        settings = {
            name: Setting(name=name, written=key, values=(value,))
            for name, (key, value) in names.items()
        }
        if known := self.vocabulary(settings):
            reading.hints["model.vocab_size"] = known
        return content


def beside(script: Script, name: str) -> str | None:
    """Return the text of a file that a script names; None where it is not at hand."""
    return file_of(script.files, name)


def file_of(files: Mapping[str, str], name: str) -> str | None:
    """Return the text of a file, by the name that a configuration gives it or the last part of
    that; None: not at hand.
    """
    path = PurePosixPath(name)
    return next((files[each] for each in (name, str(path), path.name) if each in files), None)


def mapping_of(text: str) -> dict[str, Any] | None:
    """Return what a YAML text holds; None where it is none, as a shell script."""
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


def parsed(text: str) -> dict[str, Any]:
    """Return what a file of keys holds, in JSON or YAML. Raises InputError."""
    try:
        return documents.parse(text, origin=Path("deepspeed.json"))
    except InputError:  # YAML in braces, with comments
        return documents.parse(text, origin=Path("configuration.yaml"))
