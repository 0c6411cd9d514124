"""Logs as JSON lines, or as text for people; each line knows the request and the search it belongs to."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

Form = Literal["json", "text"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
search_id: ContextVar[str | None] = ContextVar("search_id", default=None)

_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
"""What every record has; anything else came through `extra`."""


class JsonLines(logging.Formatter):
    """{"at", "level", "logger", "message", "request_id"?, "search_id"?, "error"?} and whatever `extra` held."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(),
            **{name: value for name, value in vars(record).items() if name not in _FIELDS},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Text(logging.Formatter):
    """Time, message, and the ids at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name, value in _ids().items())
        return f"{super().format(record)} {ids}".rstrip()


def configure(*, form: Form, level: str) -> None:
    """Send what the service and its server say to stderr. Libraries are heard from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in ("service", "hp_tool", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())


@contextmanager
def about(*, request: str | None = None, search: str | None = None) -> Iterator[None]:
    """Every line logged meanwhile carries these ids."""
    before = request_id.set(request or request_id.get()), search_id.set(search or search_id.get())
    try:
        yield
    finally:
        request_id.reset(before[0])
        search_id.reset(before[1])


def _ids() -> dict[str, str]:
    ids = {"request_id": request_id.get(), "search_id": search_id.get()}
    return {name: value for name, value in ids.items() if value is not None}
