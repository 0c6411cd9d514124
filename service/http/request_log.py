"""Every request's id, log line and metrics; changing requests also get a row in the audit log."""

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
"""Successful reads faster than this are logged only at level debug: at a thousand a second they
would flood the log.
"""


class RequestLog:
    """The outermost layer, so it also sees what the gate refuses."""

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
                resource = made_at(scope["path"], location=headers.get("Location", ""))
            await send(message)

        started = time.perf_counter()
        with logs.about(request=request_id):
            try:
                await self.app(scope, receive, observed)
            except Exception:
                log.exception("unhandled error at %s %s", scope["method"], scope["path"])
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
            with logs.about(search=search_id):
                log.log(level, "%s %s %d", method, scope["path"], status, extra=details)
        over_limit = (
            status == HTTPStatus.TOO_MANY_REQUESTS and route == UNMATCHED
        )  # such requests could fill the table
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
        except HpToolError as error:  # the answer is sent; the ordinary log has the request
            log.error("not audited: %s", error.message)


def made_at(path: str, *, location: str) -> str:
    """Path of what a request made, where its answer's `Location` lies below the path that was asked
    for; else that path.
    """
    made = location.partition("?")[0]
    return made if made.startswith(f"{path.removesuffix('/new')}/") else path


def route_of(scope: Scope) -> str:
    """The pattern that the path matched, as `/v1/searches/{search_id}`.

    The route knows only its own part of the pattern; the prefix of its router comes before, without
    parameters.
    """
    pattern = getattr(scope.get("route"), "path_format", None)
    if not isinstance(pattern, str):
        return UNMATCHED
    own = pattern.format(**scope.get("path_params", {}))
    prefix, separator, _ = scope["path"].rpartition(own)
    return prefix + pattern if separator else pattern
