"""Show errors to browsers as HTML pages with a link back, instead of as JSON."""

import json
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import MEDIA_TYPE
from service.dashboard.page import render_html

HEADINGS = {
    404: "Not found",
    409: "Not possible now",
    422: "Not understood",
    503: "The database is unavailable",
}
REPLACED_HEADERS = {b"content-length", b"content-type"}


class ErrorPages:
    """Middleware that replaces problem+json by HTML if a browser opens a page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_navigation(scope):
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def replaced(message: Message) -> None:
            nonlocal start, body
            if (
                message["type"] == "http.response.start"
                and Headers(raw=message["headers"]).get("content-type") == MEDIA_TYPE
            ):
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    html = error_page(json.loads(body), back=_back_link(scope)).encode()
                    unchanged = [
                        header
                        for header in start["headers"]
                        if header[0].lower() not in REPLACED_HEADERS
                    ]
                    new = [
                        (b"content-type", b"text/html; charset=utf-8"),
                        (b"content-length", str(len(html)).encode()),
                    ]
                    await send({**start, "headers": [*unchanged, *new]})
                    await send({"type": "http.response.body", "body": html})

        await self.app(scope, receive, replaced)


def error_page(problem: dict[str, object], *, back: str) -> str:
    """Render a problem as HTML with a link back."""
    status = problem["status"]
    heading = (
        HEADINGS.get(status, problem["title"]) if isinstance(status, int) else problem["title"]
    )
    page = {"title": heading, "json_href": None, "problem": problem, "back": back}
    return render_html("error.html", page=page, section=None)


def _is_navigation(scope: Scope) -> bool:
    accepts = Headers(scope=scope).get("accept", "")
    path: str = scope["path"]
    return "text/html" in accepts and not path.startswith("/v1/") and not path.endswith(".json")


def _back_link(scope: Scope) -> str:
    headers = Headers(scope=scope)
    came_from = urlsplit(headers.get("referer", ""))
    path = came_from.path
    elsewhere = (
        came_from.netloc != headers.get("host") or not path.startswith("/") or path.startswith("//")
    )
    if elsewhere or unquote(path) == scope["path"]:
        return "/"
    return path + (f"?{came_from.query}" if came_from.query else "")
