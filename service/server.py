"""The API as a process."""

from __future__ import annotations

import uvicorn

from service import logs
from service.app import create_app
from service.settings import Settings


def run(*, settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; open event streams get a few seconds to end."""
    logs.configure(form=settings.log_form, level=settings.log_level)
    uvicorn.run(
        create_app(settings),
        log_config=None,
        host=settings.host,
        port=settings.port,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        # Every worker would be a process with its own pool; the work is short, so one process and threads do.
        workers=1,
    )
