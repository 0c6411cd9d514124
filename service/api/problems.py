"""Convert errors to problem responses (RFC 9457, with code and field)."""

import math
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from hp_tool.errors import HpToolError, LimitError, NotFoundError
from service.api.views import STATUS_BY_CLASS
from service.http.turns import BUSY

MEDIA_TYPE = "application/problem+json"

# HTTP status by error code. Codes that are not listed use the status of their error class.
STATUS_BY_CODE: dict[str, int] = {
    "client_gone": 400,
    "unauthorized": 401,
    "key_expired": 401,
    "key_revoked": 401,
    "cross_origin": 403,
    "forbidden": 403,
    "request_timeout": 408,
    "payload_too_large": 413,
    "unknown_host": 421,
    BUSY: 503,
}
RETRY_S = "2"
"""Retry-After in seconds if the database is unreachable or the connection pool is exhausted. Both
are usually brief.
"""
BODY = "body"
"""Field name in errors about the request body as a whole."""
CODE_BY_STATUS: dict[int, str] = {404: "not_found", 405: "method_not_allowed"}


class Problem(BaseModel):
    """An error (RFC 9457) with a stable code and the field at fault."""

    type: str = "about:blank"
    title: str
    """HTTP status phrase."""
    status: int
    detail: str
    """What is wrong and what to do."""
    code: str
    """Stable code of the error."""
    field: str | None = None
    """Dotted path of the input at fault."""


def problem(error: HpToolError, *, path_parameters: Collection[str] = ()) -> JSONResponse:
    """Return the response for an error.

    An unknown name is a 404 if it is in the path, and invalid input if it is in the body.
    """
    in_body = (
        isinstance(error, NotFoundError)
        and error.field is not None
        and error.field not in path_parameters
    )
    by_class = (
        422
        if in_body
        else next(status for kind, status in STATUS_BY_CLASS if isinstance(error, kind))
    )
    status = STATUS_BY_CODE.get(error.code, by_class)
    field = error.field or (BODY if status == HTTPStatus.UNPROCESSABLE_ENTITY else None)
    response = _response(
        status, code=error.code, detail=error.message, field=field, details=error.details
    )
    if isinstance(error, LimitError):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers["Retry-After"] = RETRY_S
    if status == HTTPStatus.UNAUTHORIZED:
        # Basic authentication lets a browser ask for the key: any user name, and the key as
        # password.
        response.headers["WWW-Authenticate"] = 'Basic realm="hp-tool", charset="UTF-8"'
    return response


def install(app: FastAPI) -> None:
    """Install handlers for all kinds of errors."""

    @app.exception_handler(HpToolError)
    async def _handle_hp_tool_error(request: Request, error: HpToolError) -> JSONResponse:
        return problem(error, path_parameters=request.path_params)

    @app.exception_handler(RequestValidationError)
    async def _parameters(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = error.errors()
        where = _path(errors[0]["loc"])
        # A union type reports one error per branch.
        expected = " or ".join(
            dict.fromkeys(_expected(part) for part in errors if _path(part["loc"]) == where)
        )
        detail = (
            f"{where} is missing"
            if errors[0]["type"] == "missing"
            else f"{where} must be {expected}{_received_value(errors[0])}"
        )
        return _response(422, code="invalid_input", detail=detail, field=where)

    @app.exception_handler(HTTPException)
    async def _framework(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == HTTPStatus.BAD_REQUEST:  # The framework's status for invalid JSON.
            return _response(422, code="syntax", detail=str(error.detail), field=BODY)
        code = CODE_BY_STATUS.get(error.status_code, "http_error")
        is_unrouted = (
            error.status_code == HTTPStatus.NOT_FOUND
            and error.detail == HTTPStatus.NOT_FOUND.phrase
        )
        detail = "No such route." if is_unrouted else str(error.detail)
        response = _response(error.status_code, code=code, detail=detail, field=None)
        response.headers.update(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response.headers["Allow"] = ", ".join(sorted(_allowed(request)))
        return response

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        # The traceback is logged but not returned, because it may contain other callers' data.
        request_id = getattr(request.state, "request_id", None)
        detail = "Internal error; it has been logged" + (
            f" as request {request_id}." if request_id else "."
        )
        response = _response(500, code="internal", detail=detail, field=None)
        # This response bypasses the request log, which adds the header to other responses.
        if request_id:
            response.headers["X-Request-ID"] = request_id
        return response


def _path(loc: Sequence[int | str]) -> str:
    """Return the dotted path of a field as sent, without location (query, body) and union branches.

    For an error about a whole location, return the location.
    """
    return ".".join(str(part) for part in loc[1:] if "[" not in str(part)) or str(loc[0])


EXPECTED = {
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_too_long": "of at most {max_length} characters",
    "string_too_short": "of at least {min_length} characters",
    "too_long": "at most {max_length} values",
    "date_from_datetime_parsing": "a date such as 2026-01-31",
}
"""Description of the expected value, by the framework's error type."""


def _expected(error: Mapping[str, Any]) -> str:
    """Describe the expected value; by default with the framework's message."""
    words = EXPECTED.get(error["type"])
    return (
        str(error["msg"]).removeprefix("Input should be ")
        if words is None
        else words.format(**error.get("ctx", {}))
    )


def _received_value(error: Mapping[str, Any]) -> str:
    received = error.get("input")
    return (
        f", not {received!r}"
        if isinstance(received, str | int | float) and len(str(received)) <= 40
        else ""
    )


def _allowed(request: Request) -> set[str]:
    """Return the methods of all routes that match the path. The framework reports only the first.

    Routes without path parameters take precedence.
    """
    routes = [
        route
        for route in iter_route_contexts(request.app.routes)
        if route.matches(request.scope)[0] is Match.PARTIAL
    ]
    literal = [route for route in routes if not route.matches(request.scope)[1].get("path_params")]
    return {method for route in literal or routes for method in route.methods or ()}


def plain_problem(status: int, *, code: str, detail: str) -> bytes:
    """Return a complete HTTP/1.1 problem response, for connections closed before a request."""
    body = (
        Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, code=code)
        .model_dump_json()
        .encode()
    )
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {MEDIA_TYPE}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *((f"Retry-After: {RETRY_S}",) if status == HTTPStatus.SERVICE_UNAVAILABLE else ()),
    )
    return "\r\n".join((*head, "", "")).encode() + body


def _response(
    status: int,
    *,
    code: str,
    detail: str,
    field: str | None,
    details: Mapping[str, Any] | None = None,
) -> JSONResponse:
    body = Problem(
        title=HTTPStatus(status).phrase, status=status, detail=detail, code=code, field=field
    )
    return JSONResponse(
        body.model_dump() | dict(details or {}), status_code=status, media_type=MEDIA_TYPE
    )
