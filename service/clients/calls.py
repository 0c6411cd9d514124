"""What a client sends and reads: one request with the type of its answer, and problems as the
library's errors.
"""

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
from service.clients.retries import AWAY

if TYPE_CHECKING:
    from service.async_client import AsyncClient
    from service.client import Client

JsonObject = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

ERROR_BY_STATUS: dict[int, type[HpToolError]] = {
    **{
        status: kind for kind, status in STATUS_BY_CLASS if kind is not LimitError
    },  # which also needs a wait
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
"""A failed search stores only the code of its error; this maps the code back to a class."""
PROBLEM_KEYS = {"type", "title", "status", "detail", "code", "field"}
"""What every problem has; any other key is of the error's details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request, and the type of its answer."""

    method: str = "GET"
    path: str
    answer: Any
    """The type T, for pydantic."""
    json: Mapping[str, Any] | list[Mapping[str, Any]] | None = None
    files: Sequence[tuple[str, Any]] | None = None
    """Parts of a form, as httpx takes them: open files are streamed."""
    params: Mapping[str, Any] | None = None
    """Parameters of the query string; None leaves one out."""
    headers: Mapping[str, str] | None = None
    timeout: Any = httpx.USE_CLIENT_DEFAULT
    """Seconds or an httpx.Timeout."""
    may_be_pending: bool = False
    """A 202 has no answer yet: it is read as None."""

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request as `http` sends it."""
        params = None if self.params is None else without_none(self.params)
        sent: JsonObject = {
            "json": self.json,
            "files": self.files,
            "params": params,
            "headers": self.headers,
        }
        return http.build_request(self.method, self.path, timeout=self.timeout, **sent)

    def read(self, response: httpx.Response) -> T:
        """The answer in `response`; raises the error that a problem in it stands for."""
        raise_problem(response)
        if self.may_be_pending and response.status_code == httpx.codes.ACCEPTED:
            return cast(T, None)
        return cast(T, parsed(self.answer, response.content))


class Endpoint(Generic[P, T]):
    """A method of both clients, written as the call it makes: `Client` returns the answer,
    `AsyncClient` an awaitable of it.
    """

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


def with_result(answer: JsonObject) -> JsonObject:
    """The answer if it holds a result, even beside an error; raises the error of a search that
    measured nothing.
    """
    if "recommendations" in answer:
        return answer
    error = answer["error"]
    raise ERROR_BY_CODE.get(error["code"], HpToolError)(
        error["message"], code=error["code"], field=error.get("field")
    )


def unreachable(server: object, error: httpx.TransportError | str) -> StoreError:
    """The error for a server that does not answer."""
    return StoreError(
        f"{server} does not answer: {error}", field="server", code="server_unreachable"
    )


def raise_problem(response: httpx.Response) -> None:
    """Raise the error that a complete response stands for, as the library would have raised it in
    this process.
    """
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
        if response.status_code in AWAY:  # a proxy's own page: nobody answers behind it
            kind = StoreError
        raise kind(
            f"{response.url} answered {response.status_code} {response.reason_phrase}",
            code="http_error",
        ) from None


def parsed(kind: Any, text: str | bytes) -> Any:
    """`text` as the type `kind`; raises HpToolError where the server sends something else."""
    try:
        return schema.adapter(kind).validate_json(text)
    except ValidationError as error:
        raise HpToolError(
            f"the server's answer is not understood: {error.errors()[0]['msg']}", code="bad_answer"
        ) from error


def without_none(values: Mapping[str, Any]) -> JsonObject:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
