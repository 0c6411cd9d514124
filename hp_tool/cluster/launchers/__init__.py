"""Launchers, one per kind of cluster. They implement `domain.ports.Launcher`.

A launcher's module is imported only when the launcher is created.
"""

from importlib import import_module
from typing import Any

from hp_tool.domain.ports import Launcher
from hp_tool.errors import InputError
from hp_tool.extras import require

_ADAPTERS = {
    "local": ("hp_tool.cluster.launchers.local", "LocalLauncher"),
    "slurm": ("hp_tool.cluster.launchers.slurm", "SlurmLauncher"),
    "kubernetes": ("hp_tool.cluster.launchers.kubernetes", "KubernetesLauncher"),
    "endpoint": ("hp_tool.cluster.launchers.endpoint", "EndpointLauncher"),
    "ray": ("hp_tool.cluster.launchers.ray_jobs", "RayLauncher"),
}


def names() -> tuple[str, ...]:
    """Return the names of all launchers."""
    return tuple(_ADAPTERS)


def check_known(name: str) -> None:
    """Raise InputError if no launcher is called `name`."""
    if name not in _ADAPTERS:
        raise InputError(
            f"Unknown launcher {name!r}; known: {', '.join(sorted(_ADAPTERS))}.",
            field="search.launcher",
        )


def create(name: str, **options: Any) -> Launcher:
    """Create a launcher.

    Args:
        name: Name of the launcher.
        **options: Keyword arguments of its constructor.

    Raises:
        InputError: The name is unknown.
        MissingExtraError, UnsupportedError: See `extras.require`.
    """
    check_known(name)
    require("search", by=f"launcher {name}")
    module, adapter = _ADAPTERS[name]
    launcher: Launcher = getattr(import_module(module), adapter)(**options)
    return launcher
