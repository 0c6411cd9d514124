"""A program that a run starts in place of the built-in profiler."""

from __future__ import annotations

from dataclasses import dataclass, field

from hp_tool.domain.fields import Strict


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Strict):
    """Someone's own trainer, with the configuration filled in. Its log is read afterwards; it needs nothing of ours."""

    command: tuple[str, ...]
    """argv, run in the job's folder; never a shell string."""
    torchrun: bool = True
    """Whether torchrun starts it, once for each device; else it is started as it stands, once on each node."""
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Texts to lay into the job's folder before it starts, by name."""
    returns: tuple[str, ...] = ()
    """Files that it leaves there and that are read afterwards."""
