"""The route /mcp. It imports the MCP SDK at the first request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup
from starlette.types import Receive, Scope, Send

from service.agents import require_sdk

if TYPE_CHECKING:
    from service.agents.server import MountedServer


class AgentsRoute:
    """The /mcp endpoint, which serves requests while `open` is active.

    Without the SDK, requests raise MissingExtraError.
    """

    def __init__(self) -> None:
        self._tasks: TaskGroup | None = None
        self._mounted: MountedServer | None = None
        self._building = anyio.Lock()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open the endpoint for the lifetime of the application."""
        async with anyio.create_task_group() as self._tasks:
            yield
            self._mounted = None
            self._tasks.cancel_scope.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        require_sdk()
        async with self._building:
            if self._mounted is None:
                from service.agents.server import MountedServer

                assert self._tasks is not None  # The endpoint is open while the application runs.
                mounted = MountedServer()
                await self._tasks.start(mounted.run)
                self._mounted = mounted
        await self._mounted.app(scope, receive, send)
