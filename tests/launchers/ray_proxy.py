"""A proxy in front of a Ray head's Jobs API that can answer in its place, as proxies do while a
head restarts.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PADDING = "<!-- padding, so that no browser shows a page of its own -->" * 20
PAGE = f"<html><body><h1>Service unavailable</h1>{PADDING}</body></html>"


@dataclass(kw_only=True)
class Proxy:
    """How the proxy answers, and what it saw."""

    head: str
    """Address of the head behind it."""
    status: int | None = None
    """What every request is answered with, beside PAGE; None: what the head says."""
    lost_submissions: int = 0
    """Submissions still to come that reach the head, and whose answer is lost."""
    refused: int = 0
    """Requests that were answered with `status`."""
    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def proxy_of(head: str) -> Iterator[Proxy]:
    """Serve a proxy of the head at this address on a free port of the loopback device."""
    proxy = Proxy(head=head)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def _reply(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _forward(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with proxy.lock:
                if proxy.status is not None:
                    proxy.refused += 1
                    self._reply(proxy.status, PAGE.encode(), "text/html")
                    return
            head = http.client.HTTPConnection(urlsplit(proxy.head).netloc, timeout=60)
            kind = self.headers.get("Content-Type", "application/octet-stream")
            head.request(self.command, self.path, body=sent or None, headers={"Content-Type": kind})
            answer = head.getresponse()
            body = answer.read()
            head.close()
            if self.command == "POST" and self.path == "/api/jobs/" and proxy.lost_submissions:
                proxy.lost_submissions -= 1
                self.close_connection = True  # and nothing is said
                return
            self._reply(answer.status, body, answer.headers.get("Content-Type", "text/plain"))

        do_GET = do_POST = do_PUT = do_DELETE = _forward  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
