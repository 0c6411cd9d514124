"""Write logs as JSON lines or as plain text.

Each line contains the IDs of the request and the search that it belongs to.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal

from hp_tool.errors import HpToolError

Form = Literal["json", "text"]

_IDS: ContextVar[Mapping[str, str]] = ContextVar("ids", default=MappingProxyType({}))
"""IDs (request_id, search_id) that are added to the lines logged in this context."""

_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
"""Attributes that every log record has. All other attributes come from `extra`."""


class JsonLines(logging.Formatter):
    """Formats records as JSON lines.

    A line contains {"at", "level", "logger", "message", "request_id"?, "search_id"?, "error"?} and
    the fields of `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_IDS.get(),
            **{name: value for name, value in vars(record).items() if name not in _FIELDS},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Text(logging.Formatter):
    """Formats records as text: time, message, and the IDs at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name, value in _IDS.get().items())
        return f"{super().format(record)} {ids}".rstrip()

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Return the line with line breaks and escape sequences escaped.

        A path or name can therefore not imitate another log line.
        """
        record.message = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.message
        )
        return super().formatMessage(record)


def configure_logging(*, form: Form, level: str) -> None:
    """Log to stderr: the service and its server from `level`, libraries from level warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in ("service", "hp_tool", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())


@contextmanager
def log_context(*, request: str | None = None, search: str | None = None) -> Iterator[None]:
    """Add these IDs to all lines logged within the context."""
    ids = {"request_id": request, "search_id": search}
    token = _IDS.set({**_IDS.get(), **{name: value for name, value in ids.items() if value}})
    try:
        yield
    finally:
        _IDS.reset(token)


@contextmanager
def log_errors(task: str, log: logging.Logger) -> Iterator[None]:
    """Log errors of `task` instead of raising them, so that a loop continues after a failure."""
    try:
        yield
    except HpToolError as error:
        log.warning("cannot %s: %s", task, error.message)
    except Exception:
        log.exception("cannot %s: unhandled error", task)
