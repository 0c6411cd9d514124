"""Optional extras of the package: their modules, and the error for a missing extra.

Without extras, the package answers queries. Searches, the service, launch scripts and plots need an
extra. Their entry points check it here before they import it.
"""

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hp_tool.errors import MissingExtraError, UnsupportedError

Extra = Literal[
    "client", "import", "search", "service", "plot", "mcp", "profiler", "postgresql", "ray"
]

_CLIENT = ("httpcore", "httpx")
_IMPORT = ("tree_sitter", "tree_sitter_bash")
_SEARCH = (
    *_CLIENT,
    *_IMPORT,
    "alembic",
    "optuna",
    "psutil",
    "scipy",
    "sqlalchemy",
    "threadpoolctl",
)
_SERVICE = (
    *_SEARCH,
    "fastapi",
    "jinja2",
    "markdown_it",
    "prometheus_client",
    "python_multipart",
    "uvicorn",
)

EXTRAS: dict[Extra, tuple[str, ...]] = {
    "client": _CLIENT,
    "import": _IMPORT,
    "search": _SEARCH,
    "service": _SERVICE,
    "plot": ("plotly", "kaleido"),
    "mcp": (*_SERVICE, "mcp"),
    "profiler": ("psutil", "torch", "megatron"),
    "postgresql": ("psycopg",),
    "ray": ("ray",),
}
"""Modules that each extra in pyproject.toml installs, including the modules of extras that it
depends on.
"""

USED_BY: dict[Extra, str] = {
    "client": "`--server` and the Python clients",
    "import": "`import` of launch scripts and your own training commands",
    "search": "`tune`, `worker`, `calibrate`, `measurements` and `db`",
    "service": "`serve`, `keys` and `report`",
    "plot": "`recommend --plot`",
    "mcp": "`mcp`, tools for agents",
    "profiler": "profile runs on this machine",
    "postgresql": "a PostgreSQL database",
    "ray": "runs on a Ray cluster",
}
"""What each extra is needed for, as text for error messages."""

_POSIX = frozenset[Extra]({"search", "service", "mcp"})
"""Extras that lock files with fcntl, which Windows lacks."""


def missing(extra: Extra) -> tuple[str, ...]:
    """Return the extra's modules that are not installed, without importing any."""
    return tuple(name for name in EXTRAS[extra] if find_spec(name) is None)


def require(extra: Extra, *, by: str) -> None:
    """Raise an error unless the extra is installed and supported on this system.

    Args:
        extra: Name of the extra.
        by: What needs the extra, in the singular, such as "`hp-tool tune`".

    Raises:
        MissingExtraError: A module is missing; the error contains the command that installs the
            extra.
        UnsupportedError: The extra needs Linux, macOS or WSL.
    """
    if extra in _POSIX and find_spec("fcntl") is None:
        raise UnsupportedError(
            f"{by} needs Linux, macOS or WSL, because it locks files with fcntl; predictions "
            "work on any system"
        )
    if names := missing(extra):
        raise MissingExtraError(f"{by} needs {', '.join(names)}: {install_command(extra)}")


def install_command(extra: Extra) -> str:
    """Return the pip command that adds an extra to this installation.

    The command installs from the checkout, wheel or repository that this package came from. It
    names a package index only if pip wrote no direct_url.json (PEP 610), which means that the
    package came from an index.
    """
    if (root := _checkout()) is not None:
        return f"pip install -e {shlex.quote(f'{root}[{extra}]')}"
    origin = _origin()
    url = str(origin.get("url", ""))
    if not url:
        return f"pip install {shlex.quote(f'hp-tool[{extra}]')}"
    if "dir_info" in origin:
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        editable = "-e " if origin["dir_info"].get("editable") else ""
        return (
            f"pip install {editable}{shlex.quote(f'{url2pathname(urlsplit(url).path)}[{extra}]')}"
        )
    if "vcs_info" in origin:
        version = origin["vcs_info"]
        url = f"{version.get('vcs', 'git')}+{url}@{version.get('commit_id', '')}".removesuffix("@")
        url += f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
    return f"pip install {shlex.quote(f'hp-tool[{extra}] @ {url}')}"


def _checkout() -> Path | None:
    """Return the folder of this package's checkout; None if it is installed elsewhere."""
    root = Path(__file__).absolute().parents[1]
    project = root / "pyproject.toml"
    return (
        root
        if project.is_file() and 'name = "hp-tool"' in project.read_text(encoding="utf-8")
        else None
    )


def _origin() -> dict[str, Any]:
    """Return pip's record of where the package came from; empty if it came from an index."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("hp-tool").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}
