"""Somebody who is told by webhook, over a real socket, and settings that allow to tell them."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer

from service.settings import webhook_settings
from service.webhooks.policy import WebhookSettings

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
"""Of the specification's own example."""


def settings_of(networks: str) -> WebhookSettings:
    found = webhook_settings({"HP_WEBHOOK_SECRET": SECRET, "HP_WEBHOOK_NETWORKS": networks})
    assert found is not None
    return found


PUBLIC, HERE = settings_of(""), settings_of("127.0.0.0/8, ::1/128")


class Receiver(HTTPServer):
    """Answers with the statuses it is given, then with 204; keeps what came."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses = list(statuses)
        self.came: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?token=t"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.came.append((self.path, dict(self.headers.items()), body))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", self.server.url)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass
