"""The answer of an ended search, and typed answers as responses."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from hp_tool.domain.records import SearchRecord
from hp_tool.queries import schema


def json_response(answer: object) -> Response:
    """An answer as its response; it is typed already, so FastAPI need not validate it a second time."""
    return Response(schema.to_json(answer), media_type="application/json")


def search_answer(record: SearchRecord) -> dict[str, Any]:
    """An ended search's result: what it found, or why it found nothing."""
    if record.result is not None:
        return record.result
    error = record.error or {"code": str(record.state), "message": f"the search was {record.state}", "field": None}
    return {
        "id": record.query.get("id"),
        "status": "error",
        "error": error,
        "search": {"id": record.id, "state": str(record.state), "stopped_because": record.stopped_because},
    }
