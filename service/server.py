"""The API as a process."""

from __future__ import annotations

import uvicorn

from service.app import create_app
from service.settings import Settings


def run(*, settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; open event streams get a few seconds to end."""
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        # Every worker would be a process with its own pool; the work is short, so one process and threads do.
        workers=1,
    )
