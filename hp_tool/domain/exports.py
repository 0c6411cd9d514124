"""Port that gives a trainer's command the configuration as flags or as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hp_tool.domain.setups import TrainingSetup


class Export(Protocol):
    """A way to write a training configuration for the tool that runs it."""

    @property
    def name(self) -> str: ...

    @property
    def flags(self) -> Callable[[TrainingSetup], list[str]] | None:
        """Returns the configuration as command-line words; None: the tool reads a file."""

    @property
    def flags_name(self) -> str:
        """Name of the flags in a command's placeholder; empty: `name`."""

    @property
    def file(self) -> str | None:
        """Name of the configuration's file in a run's folder; None: the tool reads flags."""

    @property
    def write(self) -> Callable[[TrainingSetup], str] | None:
        """Returns the text of the file."""

    @property
    def says_shape(self) -> bool:
        """Whether flags or file contain the shape of the model."""

    @property
    def fewer_layers(self) -> Callable[[TrainingSetup], list[str]] | None:
        """Returns the words that set the number of layers of a reduced run."""


_source: Callable[[], Iterable[Export]] = tuple


def set_exports(source: Callable[[], Iterable[Export]]) -> None:
    """Set the function that returns all exports; the package does so when it is imported."""
    global _source
    _source = source


def list_exports() -> tuple[Export, ...]:
    """Return all exports, in the order of lists."""
    return tuple(_source())
