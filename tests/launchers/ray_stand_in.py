"""A stand-in for a Ray head's Jobs API over HTTP: jobs end at once with the result they were given;
while `refusals` lasts it answers as a head whose agents have not started yet.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hp_tool.cluster.launchers.supervisor import MARK

NO_AGENT = "No available agent to submit job, please try again later."


@dataclass(kw_only=True)
class RayHead:
    """What the stand-in knows and how it answers."""

    result: Mapping[str, Any]
    refusals: dict[str, int] = field(default_factory=dict)
    """Answers of `NO_AGENT` still to come, by what is asked: `submit`, `logs`."""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    address: str = ""

    def log(self) -> str:
        """What a job's supervisor prints."""
        ended = {"reason": "exited", "exit_code": 0, "wall_s": 1.0, "oom_kills": 0}
        lines = (
            {"began": 1.0},
            {"file": "result.json", "text": json.dumps(self.result)},
            {"ended": ended},
        )
        return "".join(f"\n{MARK[0]}{json.dumps(line)}{MARK[1]}\n" for line in lines)


@contextmanager
def ray_head(head: RayHead) -> Iterator[RayHead]:
    """Serve `head` on a free port of the loopback device."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def _answer(self, value: object, status: int = 200) -> None:
            body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _refused(self, what: str) -> bool:
            if head.refusals.get(what, 0) <= 0:
                return False
            head.refusals[what] -= 1
            self._answer(NO_AGENT, 500)
            return True

        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/jobs/").removesuffix("/logs")
            if self.path == "/api/version":
                self._answer(
                    {
                        "version": "4",
                        "ray_version": "2.60.0",
                        "ray_commit": "x",
                        "session_name": "s",
                    }
                )
            elif self.path.startswith("/api/packages/"):
                self._answer("")
            elif self.path == "/api/jobs/":
                self._answer(list(head.jobs.values()))
            elif name not in head.jobs:
                self._answer(f"Job {name} does not exist", 404)
            elif self.path.endswith("/logs"):
                if not self._refused("logs"):
                    self._answer({"logs": head.log()})
            else:
                self._answer(head.jobs[name])

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if self.path.endswith("/stop"):
                self._answer({"stopped": True})
            elif not self._refused("submit"):
                name = asked["submission_id"]
                about = {
                    "type": "SUBMISSION",
                    "submission_id": name,
                    "status": "SUCCEEDED",
                    "start_time": 1,
                    "end_time": 2,
                }
                head.jobs[name] = about | {
                    "entrypoint": asked["entrypoint"],
                    "metadata": asked["metadata"],
                }
                self._answer({"job_id": name, "submission_id": name})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    head.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield head
    finally:
        server.shutdown()
        server.server_close()
