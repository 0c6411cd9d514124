"""Around every request: an id that comes back with the answer, a line in the log, a number for Prometheus, and for what
changes something a row in the audit log.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hp_tool.domain.access_store import AccessStore
from hp_tool.errors import HpToolError
from service import logs
from service.keys import Principal
from service.metrics import Metrics
from service.routes import COMPUTING, SAFE_METHODS

log = logging.getLogger(__name__)

HEADER = "X-Request-ID"
ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
METHODS = SAFE_METHODS | {"POST", "PUT", "PATCH", "DELETE"}
UNMATCHED = "unmatched"
SLOW_S = 1.0
"""Quick successful reads are logged at level debug only: a service that is asked a thousand times a second drowns in them."""


class RequestLog:
    """The outermost layer: it sees what the gate refuses, too."""

    def __init__(self, app: ASGIApp, metrics: Metrics, store: AccessStore) -> None:
        self.app = app
        self.metrics = metrics
        self.store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if ACCEPTED_ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        started = time.perf_counter()
        with logs.about(request=request_id):
            try:
                await self.app(scope, receive, observed)
            except Exception:
                log.exception("unhandled error at %s %s", scope["method"], scope["path"])
                raise
            finally:
                await self._record(scope, status=status, seconds=time.perf_counter() - started)

    async def _record(self, scope: Scope, *, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        route = route_of(scope)
        self.metrics.count(method=method, route=route, status=status, seconds=seconds)
        quiet = scope["method"] in SAFE_METHODS and status < HTTPStatus.BAD_REQUEST and seconds < SLOW_S
        quiet = quiet or (scope["path"] in COMPUTING and status < HTTPStatus.BAD_REQUEST and seconds < SLOW_S)
        level = logging.DEBUG if quiet else logging.INFO
        principal: Principal | None = scope["state"].get("principal")
        if log.isEnabledFor(level):
            details = {"method": method, "path": scope["path"], "status": status, "seconds": round(seconds, 4)}
            if principal is not None and principal.owner is not None:
                details["owner"] = principal.owner
            search_id = scope.get("path_params", {}).get("search_id")
            with logs.about(search=search_id):
                log.log(level, "%s %s %d", method, scope["path"], status, extra=details)
        if principal is not None and audited(method=method, path=scope["path"], route=route, status=status):
            await self._audit(scope, principal, route=route, status=status)

    async def _audit(self, scope: Scope, principal: Principal, *, route: str, status: int) -> None:
        path = scope["path"]
        try:
            await run_in_threadpool(
                self.store.add_audit,
                owner=principal.owner,
                api_key_id=principal.key_id,
                action=f"{scope['method']} {path if route == UNMATCHED else route}",
                resource=path,
                outcome=str(status),
                request_id=scope["state"]["request_id"],
            )
        except HpToolError as error:  # the answer is sent; what was done stands in the ordinary log
            log.error("not audited: %s", error.message)


def audited(*, method: str, path: str, route: str, status: int) -> bool:
    """What changed something or tried to, and what a key was not allowed. Not who asked too often: it could fill the table."""
    if status == HTTPStatus.TOO_MANY_REQUESTS and route == UNMATCHED:
        return False
    return status == HTTPStatus.FORBIDDEN or (method not in SAFE_METHODS and path not in COMPUTING)


def route_of(scope: Scope) -> str:
    """The pattern that the path matched, as `/v1/searches/{search_id}`.

    The route knows its own part of the pattern; what stands before that, the prefix of its router, holds no parameters.
    """
    pattern = getattr(scope.get("route"), "path_format", None)
    if not isinstance(pattern, str):
        return UNMATCHED
    own = pattern.format(**scope.get("path_params", {}))
    prefix, found, _ = scope["path"].rpartition(own)
    return prefix + pattern if found else pattern
