"""Typed client requests, and the conversion of problem responses to exceptions."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import httpx
from pydantic import ValidationError

from hp_tool.errors import (
    ConflictError,
    HpToolError,
    InputError,
    LauncherError,
    LimitError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from hp_tool.questions import schema
from service.api.views import STATUS_BY_CLASS
from service.clients.retries import UNAVAILABLE_STATUSES

if TYPE_CHECKING:
    from service.async_client import AsyncClient
    from service.client import Client

JsonObject = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

ERROR_BY_STATUS: dict[int, type[HpToolError]] = {
    # LimitError is raised separately, because it needs the waiting time.
    **{status: kind for kind, status in STATUS_BY_CLASS if kind is not LimitError},
    **dict.fromkeys((401, 403, 413), InputError),
}
ERROR_BY_CODE: dict[str, type[HpToolError]] = {
    **{
        kind.code: kind
        for kind in (
            InputError,
            NotFoundError,
            UnsupportedError,
            ConflictError,
            LauncherError,
            StoreError,
        )
    },
    "launcher_mismatch": InputError,
    "cancelled": ConflictError,
}
"""Exception class by error code, for failed searches, which store only the code."""
PROBLEM_KEYS = {"type", "title", "status", "detail", "code", "field"}
"""Standard keys of a problem response. Other keys are the error's details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """A request and the type of its response."""

    method: str = "GET"
    path: str
    answer: Any
    """Type of the response, for pydantic."""
    json: Mapping[str, Any] | list[Mapping[str, Any]] | None = None
    files: Sequence[tuple[str, Any]] | None = None
    """Parts of a form, as for httpx. Open files are streamed."""
    params: Mapping[str, Any] | None = None
    """Query parameters; parameters that are None are omitted."""
    headers: Mapping[str, str] | None = None
    timeout: Any = httpx.USE_CLIENT_DEFAULT
    """Timeout in seconds, or an httpx.Timeout."""
    may_be_pending: bool = False
    """True if the response may be a 202 (no result yet), which is returned as None.
    """

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Build the request for an httpx client."""
        params = None if self.params is None else drop_none(self.params)
        arguments: JsonObject = {
            "json": self.json,
            "files": self.files,
            "params": params,
            "headers": self.headers,
        }
        return http.build_request(self.method, self.path, timeout=self.timeout, **arguments)

    def read(self, response: httpx.Response) -> T:
        """Parse a response, or raise the error that it reports."""
        raise_problem(response)
        if self.may_be_pending and response.status_code == httpx.codes.ACCEPTED:
            return cast(T, None)
        return cast(T, parse_response(self.answer, response.content))


class Endpoint(Generic[P, T]):
    """A method of both clients. In `AsyncClient`, it returns an awaitable of the answer."""

    def __init__(self, call: Callable[Concatenate[Any, P], Call[T]]) -> None:
        self._call = call
        functools.update_wrapper(cast(Any, self), call)

    @overload
    def __get__(self, client: None, owner: type) -> Endpoint[P, T]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        if client is None:
            return self

        @functools.wraps(self._call)
        def method(*args: P.args, **arguments: P.kwargs) -> T | Awaitable[T]:
            return client.send(self._call(client, *args, **arguments))

        return method


def require_result(answer: JsonObject) -> JsonObject:
    """Return the answer if it has recommendations; otherwise raise its error."""
    if "recommendations" in answer:
        return answer
    error = answer["error"]
    raise ERROR_BY_CODE.get(error["code"], HpToolError)(
        error["message"], code=error["code"], field=error.get("field")
    )


def unreachable_error(server: object, error: httpx.TransportError | str) -> StoreError:
    """Return the error for a server that does not respond."""
    return StoreError(
        f"{server} does not respond: {error}", field="server", code="server_unreachable"
    )


def raise_problem(response: httpx.Response) -> None:
    """Raise the exception that an error response reports, as a local call would."""
    if response.is_success:
        return
    kind = ERROR_BY_STATUS.get(response.status_code, HpToolError)
    try:
        body = response.json()
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            wait_s = float(response.headers["Retry-After"])
            raise LimitError(
                body["detail"], code=body["code"], field=body.get("field"), retry_after_s=wait_s
            )
        error = kind(body["detail"], code=body["code"], field=body.get("field"))
        error.details = {name: value for name, value in body.items() if name not in PROBLEM_KEYS}
        raise error
    except (ValueError, KeyError, TypeError):
        if response.status_code in UNAVAILABLE_STATUSES:  # The server is unreachable.
            kind = StoreError
        raise kind(
            f"{response.url} returned {response.status_code} {response.reason_phrase}",
            code="http_error",
        ) from None


def parse_response(kind: Any, text: str | bytes) -> Any:
    """Parse `text` as type `kind`; raise HpToolError if it does not match."""
    try:
        return schema.adapter(kind).validate_json(text)
    except ValidationError as error:
        raise HpToolError(
            f"Cannot read the server's response: {error.errors()[0]['msg']}", code="bad_answer"
        ) from error


def drop_none(values: Mapping[str, Any]) -> JsonObject:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
