"""Request IDs, log lines and metrics of all requests, and audit rows of those that change data."""

import logging
import re
import secrets
import time
from functools import partial
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hp_tool.domain.access import AccessStore, KeyRecord
from hp_tool.errors import HpToolError
from service import logs
from service.http.metrics import Metrics
from service.http.routes import COMPUTING, SAFE_METHODS
from service.keys import Principal

log = logging.getLogger(__name__)

HEADER = "X-Request-ID"
ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
METHODS = SAFE_METHODS | {"POST", "PUT", "PATCH", "DELETE"}
UNMATCHED = "unmatched"
SLOW_S = 1.0
"""Duration in seconds above which a successful read is logged at level info instead of debug."""


class RequestLog:
    """Outermost middleware, so that requests that the gate rejects are also logged."""

    def __init__(self, app: ASGIApp, metrics: Metrics, store: AccessStore) -> None:
        self.app = app
        self.metrics = metrics
        self.store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(HEADER, "")
        if not ACCEPTED_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR
        resource = scope["path"]

        async def observed(message: Message) -> None:
            nonlocal status, resource
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                resource = created_path(scope["path"], location=headers.get("Location", ""))
            await send(message)

        started = time.perf_counter()
        with logs.log_context(request=request_id):
            try:
                await self.app(scope, receive, observed)
            except Exception:
                log.exception("Unhandled error in %s %s", scope["method"], scope["path"])
                raise
            finally:
                await self._record(
                    scope, resource=resource, status=status, seconds=time.perf_counter() - started
                )

    async def _record(self, scope: Scope, *, resource: str, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        route = route_of(scope)
        self.metrics.count(method=method, route=route, status=status, seconds=seconds)
        changes = method not in SAFE_METHODS and scope["path"] not in COMPUTING
        quiet = not changes and status < HTTPStatus.BAD_REQUEST and seconds < SLOW_S
        level = logging.DEBUG if quiet else logging.INFO
        principal: Principal | None = scope["state"].get("principal")
        if log.isEnabledFor(level):
            details = {
                "method": method,
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
            }
            if principal is not None and principal.owner is not None:
                details["owner"] = principal.owner
            search_id = scope.get("path_params", {}).get("search_id")
            with logs.log_context(search=search_id):
                log.log(level, "%s %s %d", method, scope["path"], status, extra=details)
        # Not audited, because such requests could fill the table.
        over_limit = status == HTTPStatus.TOO_MANY_REQUESTS and route == UNMATCHED
        refused: KeyRecord | None = scope["state"].get("refused_key")
        audit = partial(self._audit, scope, route=route, resource=resource, status=status)
        if refused is not None:
            await audit(owner=refused.owner, key_id=refused.id)
        elif (
            principal is not None and not over_limit and (changes or status == HTTPStatus.FORBIDDEN)
        ):
            await audit(owner=principal.owner, key_id=principal.key_id)

    async def _audit(
        self,
        scope: Scope,
        *,
        owner: str | None,
        key_id: str | None,
        route: str,
        resource: str,
        status: int,
    ) -> None:
        path = scope["path"]
        try:
            await run_in_threadpool(
                self.store.add_audit,
                owner=owner,
                api_key_id=key_id,
                action=f"{scope['method']} {path if route == UNMATCHED else route}",
                resource=resource,
                outcome=str(status),
                request_id=scope["state"]["request_id"],
            )
        except HpToolError as error:  # The response was sent, and the log contains the request.
            log.error("Cannot write the audit log: %s", error.message)


def created_path(path: str, *, location: str) -> str:
    """Return the path of the created resource, if `Location` is below the request's path.

    Otherwise return the request's path.
    """
    created = location.partition("?")[0]
    return created if created.startswith(f"{path.removesuffix('/new')}/") else path


def route_of(scope: Scope) -> str:
    """Return the pattern of the matching route, such as `/v1/searches/{search_id}`.

    A route knows only its own part of the pattern. The prefix of its router has no parameters, so
    it is taken from the path.
    """
    pattern = getattr(scope.get("route"), "path_format", None)
    if not isinstance(pattern, str):
        return UNMATCHED
    formatted = pattern.format(**scope.get("path_params", {}))
    prefix, separator, _ = scope["path"].rpartition(formatted)
    return prefix + pattern if separator else pattern
