"""The extras of the package: what each brings, and the error that names one that is missing.

`pip install hp-tool` answers questions. What runs searches, serves, reads shell scripts or draws comes with an extra, and the
doors to it ask here before they import it.
"""

from importlib.util import find_spec
from typing import Literal

from hp_tool.errors import MissingExtraError, UnsupportedError

Extra = Literal["client", "import", "search", "service", "plot", "mcp", "profiler", "postgresql", "ray"]

_CLIENT = ("httpcore", "httpx")
_IMPORT = ("tree_sitter", "tree_sitter_bash")
_SEARCH = (*_CLIENT, *_IMPORT, "alembic", "optuna", "psutil", "scipy", "sqlalchemy", "threadpoolctl")
_SERVICE = (*_SEARCH, "fastapi", "jinja2", "markdown_it", "prometheus_client", "python_multipart", "uvicorn")

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
"""Modules that each extra of pyproject.toml installs, those of the extras it includes too."""


_POSIX = frozenset[Extra]({"search", "service", "mcp"})
"""Extras whose code locks files by fcntl, which Windows lacks."""


def missing(extra: Extra) -> tuple[str, ...]:
    """Return the extra's modules that cannot be imported here. None of them is imported."""
    return tuple(name for name in EXTRAS[extra] if find_spec(name) is None)


def require(extra: Extra, *, by: str) -> None:
    """Raise MissingExtraError, with the command that installs the extra, where any module of it is missing, and
    UnsupportedError where it could not work on this system.

    `by`: what needs it, in the singular: "`hp-tool tune`".
    """
    if extra in _POSIX and find_spec("fcntl") is None:
        raise UnsupportedError(f"{by} needs Linux, macOS or WSL, because it locks files by fcntl; predictions work without")
    if names := missing(extra):
        raise MissingExtraError(f"{by} needs {', '.join(names)}: pip install 'hp-tool[{extra}]'")
