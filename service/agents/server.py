"""MCP server, over stdio for a local agent or as the service's route /mcp with its keys."""

import difflib
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import anyio
import httpx
from anyio.abc import TaskStatus
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resources import TextResource
from mcp.server.mcpserver.tools import Tool
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import ToolAnnotations
from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp

from hp_tool import __version__
from service.agents import SKILL
from service.agents.tools import Tools
from service.app import create_app
from service.async_client import AsyncClient
from service.keys import token_of
from service.settings import from_environment

CHANGING_TOOLS = {
    "start_search": ToolAnnotations(destructive_hint=False),
    "cancel_search": ToolAnnotations(destructive_hint=True),
}
READING_TOOLS = (
    "estimate",
    "recommend",
    "why_not",
    "import_config",
    "export_config",
    "size",
    "follow_search",
    "search_result",
    "catalogue",
    "query_keys",
    "explain_run",
    "watched_jobs",
)
INSTRUCTIONS = """How to split a transformer's training or serving over GPUs. recommend ranks all configurations by a cost
model; estimate predicts one; why_not says why one is infeasible or slow and how to fix it; import_config reads a script and
says which flags to change; export_config writes one; size chooses model, tokens or devices for a budget; start_search uses
GPU time for real runs. Figures are {value, interval (90%), basis}: report the interval with the value, and say if the basis
is extrapolated. Names end in SI units (_s, _bytes). The resource hp-tool://skill explains when to use which tool."""  # noqa: E501


def build(tools: Tools) -> MCPServer:
    """Build the server. It rejects unknown tool arguments."""
    server: MCPServer = MCPServer(
        "hp-tool",
        version=__version__,
        instructions=INSTRUCTIONS,
        tools=[
            *(_tool(tools, name, ToolAnnotations(read_only_hint=True)) for name in READING_TOOLS),
            *(_tool(tools, name, annotations) for name, annotations in CHANGING_TOOLS.items()),
        ],
        log_level="WARNING",
        subscriptions=False,
    )
    text = TextResource(
        uri="hp-tool://skill",
        name="skill",
        mime_type="text/markdown",
        text=SKILL.read_text(encoding="utf-8"),
    )
    server.add_resource(text)
    return server


class _Tool(Tool):
    """A tool that reports invalid arguments by name and lists the valid ones."""

    async def run(
        self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False
    ) -> Any:
        try:
            self.fn_metadata.validate_arguments(arguments)
        except ValidationError as error:
            faults = []
            for fault in error.errors(include_url=False, include_input=False):
                path = ".".join(map(str, fault["loc"]))
                unknown = fault["type"] == "extra_forbidden"
                near = (
                    difflib.get_close_matches(
                        str(fault["loc"][-1]), self.parameters["properties"], n=1
                    )
                    if unknown
                    else []
                )
                hint = f"; did you mean {near[0]}?" if near else ""
                faults.append(f"{path}: {'no such argument' if unknown else fault['msg']}{hint}")
            valid = ", ".join(self.parameters["properties"])
            raise ToolError(f"{'; '.join(faults)} ({self.name} takes {valid})") from error
        return await super().run(arguments, context, convert_result)


def _tool(tools: Tools, name: str, annotations: ToolAnnotations) -> Tool:
    tool = _Tool.from_function(getattr(tools, name), annotations=annotations)
    arguments = tool.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    tool.parameters = arguments.model_json_schema()
    tool.description = " ".join(tool.description.split())
    return tool


def run_stdio(*, server: str | None, database_url: str | None) -> None:
    """Serve one agent over stdio, with the service at `server` or with one in this process."""

    async def run() -> None:
        connection = AsyncClient(server=server) if server else _local_service(database_url)
        async with connection as client:
            run_search = (lambda search_id: None) if server else _run_in_background
            tools = Tools(
                connect=lambda context: nullcontext(client), own_files=True, run=run_search
            )
            await build(tools).run_stdio_async()

    anyio.run(run)


@asynccontextmanager
async def _local_service(database_url: str | None) -> AsyncIterator[AsyncClient]:
    settings = replace(
        from_environment(host="127.0.0.1", database_url=database_url), allowed_hosts=()
    )
    app = create_app(settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        AsyncClient(
            server="http://127.0.0.1", api_key=settings.api_key or "", transport=transport
        ) as client,
    ):
        yield client


def _run_in_background(search_id: str) -> None:
    command = [
        sys.executable,
        "-c",
        "from hp_tool.cli.main import main; main()",
        "tune",
        "--resume",
        search_id,
        "--json",
    ]
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


class MountedServer:
    """The MCP server as a route of the service. Tools call the service with the caller's key."""

    def __init__(self) -> None:
        server = build(Tools(connect=_as_caller))
        # The gate has already checked Host and Origin. Requests are stateless, so that no session
        # outlives its key.
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        server.streamable_http_app(
            stateless_http=True, json_response=True, transport_security=security
        )
        self._sessions = server.session_manager
        self.app: ASGIApp = StreamableHTTPASGIApp(self._sessions)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the session manager until this task is cancelled."""
        async with self._sessions.run():
            task_status.started()
            await anyio.sleep_forever()


def _as_caller(context: Context) -> AbstractAsyncContextManager[AsyncClient]:
    """Return a client with the caller's key, so that each route checks the caller's rights."""
    request = context.request_context.request
    assert isinstance(request, Request)  # The transport is HTTP.
    transport = httpx.ASGITransport(request.app, raise_app_exceptions=False)
    key = token_of(request.headers) or ""
    return AsyncClient(server=f"http://{request.headers['host']}", api_key=key, transport=transport)
