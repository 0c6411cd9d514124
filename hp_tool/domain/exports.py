"""Port to the formats in which a trainer's command receives its configuration: flags or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hp_tool.domain.setups import TrainingSetup


class Export(Protocol):
    """A format for passing a training configuration to the tool that runs it."""

    @property
    def name(self) -> str: ...

    @property
    def flags(self) -> Callable[[TrainingSetup], list[str]] | None:
        """Return the configuration as command-line arguments; None if the tool reads a file."""

    @property
    def flags_name(self) -> str:
        """Name of the flags in a command's placeholder; empty: the same as `name`."""

    @property
    def file(self) -> str | None:
        """Name of the configuration file in a run's folder; None if the tool reads flags."""

    @property
    def write(self) -> Callable[[TrainingSetup], str] | None:
        """Return the content of the configuration file."""

    @property
    def says_shape(self) -> bool:
        """Whether the flags or the file contain the model's shape."""

    @property
    def fewer_layers(self) -> Callable[[TrainingSetup], list[str]] | None:
        """Return the arguments that set the number of layers of a reduced run."""


_source: Callable[[], Iterable[Export]] = tuple


def set_exports(source: Callable[[], Iterable[Export]]) -> None:
    """Set the function that returns all exports. `hp_tool/__init__.py` calls it on import."""
    global _source
    _source = source


def list_exports() -> tuple[Export, ...]:
    """Return all exports, in display order."""
    return tuple(_source())
