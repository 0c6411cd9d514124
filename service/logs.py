"""Write logs as JSON lines, or as text for people.

Each line contains the ids of the request and the search to which it belongs.
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
"""Ids (request_id, search_id) of the lines that are logged in this context."""

_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
"""Attributes that every log record has. All others come from `extra`."""


class JsonLines(logging.Formatter):
    """Format records as JSON lines: {"at", "level", "logger", "message", "request_id"?,
    "search_id"?, "error"?} and the fields of `extra`.
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
    """Format records as text: time, message, and the ids at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name, value in _IDS.get().items())
        return f"{super().format(record)} {ids}".rstrip()

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Return the line with line ends and escape sequences escaped, so that a path or name
        cannot imitate another line.
        """
        record.message = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.message
        )
        return super().formatMessage(record)


def configure_logging(*, form: Form, level: str) -> None:
    """Log to stderr: the service and its server from `level`, libraries from warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in ("service", "hp_tool", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())


@contextmanager
def log_context(*, request: str | None = None, search: str | None = None) -> Iterator[None]:
    """Return a context in which every logged line contains these ids."""
    ids = {"request_id": request, "search_id": search}
    token = _IDS.set({**_IDS.get(), **{name: value for name, value in ids.items() if value}})
    try:
        yield
    finally:
        _IDS.reset(token)


@contextmanager
def log_errors(task: str, log: logging.Logger) -> Iterator[None]:
    """Return a context that logs an error of `task` instead of raising it, for loops that must
    continue after a failure.
    """
    try:
        yield
    except HpToolError as error:
        log.warning("cannot %s: %s", task, error.message)
    except Exception:
        log.exception("cannot %s: unhandled error", task)
