"""Registry of the formats of other tools: one object per kind of file or script."""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from hp_tool.domain.setups import ServingSetup, TrainingSetup
from hp_tool.domain.workload import CrossEntropy, StatePrecision
from hp_tool.errors import InputError
from hp_tool.formats import tools
from hp_tool.formats.reading import Reading
from hp_tool.formats.signs import Sign
from hp_tool.formats.source import Source

Kind = Literal["training", "inference"]
Setup = TypeVar("Setup", TrainingSetup, ServingSetup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(Generic[Setup]):
    """A tool's format: how it is detected, read and written, and what the tool supports."""

    name: str
    title: str = ""
    """The tool's name in its authors' spelling; empty if it equals `name`."""
    kind: Kind = "training"
    place: int = 1
    """Position in lists. Formats at equal positions are sorted by name."""
    signs: tuple[Sign, ...] = ()
    read: Callable[[Source, Reading], None] | None = None
    """Fills a reading with the query of a configuration."""
    write: Callable[[Setup], str] | None = None
    """Returns the text of a configuration; raises UnsupportedError if the tool cannot express it.
    """
    write_pools: Callable[[ServingSetup, ServingSetup], str] | None = None
    """Returns the text of a prefill and a decode pool."""
    options: Callable[[Setup], dict[str, str]] | None = None
    """Returns a configuration as flags or keys, each with its value."""
    notes: Callable[[str], tuple[str, ...]] = lambda text: ()
    """Returns what the user must do in addition to using the written text."""
    usual_of: str | None = None
    """Framework or engine that uses this format by default."""
    framework: str | None = None
    """Framework that the tool always uses; None if it can run any."""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Values of the `parallel` axes that the tool supports, for axes that it restricts."""
    fsdp_axes: Mapping[str, Any] = field(default_factory=dict)
    """Values of the `parallel` axes under torch-fsdp."""
    loss: CrossEntropy | None = None
    """The tool's loss implementation, if the tool has no setting for it."""
    trained_weights: StatePrecision | None = None
    """Default precision of the weights in full training with this tool."""
    logs: tuple[str, ...] = ("json",)
    """Log readers (cluster.logs) for jobs of this format. The first one that finds step times is
    used.
    """
    file: str | None = None
    """Name of the file from which a trainer's profile run reads the text."""
    flags: Callable[[TrainingSetup], list[str]] | None = None
    """Returns a configuration as words of a trainer's command line."""
    flags_name: str = ""
    """NAME in `{flags:NAME}` in a trainer's command, if it differs from `name`."""
    says_shape: bool = False
    """True if the written text and the flags contain the model's shape."""
    fewer_layers: Callable[[TrainingSetup], list[str]] | None = None
    """Returns the arguments that reduce the number of layers in a profile run."""
    reads: str = ""
    """Files and scripts that can be read, for the documentation."""
    writes: str = ""
    checked: str = ""
    """What the tests compare the written text with, for the documentation."""


_FORMATS: dict[str, Format[Any]] = {}


def register(format: Format[Any]) -> None:
    """Register a format in all interfaces.

    Raises:
        ValueError: The name is already registered.
    """
    if format.name in _FORMATS:
        raise ValueError(f"format {format.name} is registered already")
    _FORMATS[format.name] = format


def unregister(name: str) -> None:
    """Remove a format."""
    del _FORMATS[name]


@functools.cache
def _import_tools() -> None:
    for module in pkgutil.walk_packages(tools.__path__, prefix=f"{tools.__name__}."):
        importlib.import_module(module.name)


def formats(kind: Kind | None = None) -> tuple[Format[Any], ...]:
    """Return the formats of a kind, or all formats, in display order."""
    _import_tools()
    matching = (each for each in _FORMATS.values() if kind in (None, each.kind))
    return tuple(
        sorted(matching, key=lambda each: (each.kind != "training", each.place, each.name))
    )


def readable() -> tuple[str, ...]:
    """Return the names of importable formats."""
    return tuple(tool_format.name for tool_format in formats() if tool_format.read is not None)


def writable(kind: Kind | None = None) -> tuple[str, ...]:
    """Return the names of exportable formats, for one kind of query or all kinds."""
    return tuple(tool_format.name for tool_format in formats(kind) if tool_format.write is not None)


def listed_readable() -> str:
    """Return the names of importable formats as one string."""
    return ", ".join(readable())


def listed_writable() -> str:
    """Return the names of exportable formats as one string."""
    return f"{', '.join(writable('training'))}; for serving {', '.join(writable('inference'))}"


def get_format(name: str) -> Format[Any]:
    """Return the format with a name.

    Raises:
        InputError: No format has this name.
    """
    _import_tools()
    if name not in _FORMATS:
        raise InputError(
            f"no format is named {name}; choose one of: "
            f"{', '.join(tool_format.name for tool_format in formats())}",
            field="format",
        )
    return _FORMATS[name]


def default_format(kind: Kind, runs: str | None = None) -> Format[Any]:
    """Return the default format of a framework or an engine.

    `runs` names the framework or engine. If it has no format, return the first format of the kind.
    """
    matching = (tool_format for tool_format in formats(kind) if tool_format.usual_of == runs)
    return next(matching, formats(kind)[0])
