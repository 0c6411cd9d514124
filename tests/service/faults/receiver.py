"""Who is told by webhook that a search has ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Message(NamedTuple):
    """One message as it arrived."""

    id: str
    search_id: str
    state: str


@contextmanager
def receiving() -> Iterator[tuple[str, list[Message]]]:
    """The address of a receiver, and what it has been told so far."""
    told: list[Message] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.append(
                Message(
                    self.headers["webhook-id"], body["data"]["search_id"], body["data"]["state"]
                )
            )
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", told
    finally:
        server.shutdown()
        thread.join()
