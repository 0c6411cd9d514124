"""Page /run: how to run a configuration in each tool, and which settings a tool lacks.

The query is part of the URL.
"""

import json
import shlex
from dataclasses import dataclass

import yaml
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from hp_tool.domain.query import Query
from hp_tool.errors import HpToolError, NotFoundError
from hp_tool.formats.exchange.export import write_configuration
from hp_tool.formats.registry import default_format, get_format, writable
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from service.api.bodies import read_query
from service.api.dependencies import CalibrationsDep, FindDep
from service.dashboard import formats
from service.dashboard.configuration import QueryText, configuration_view
from service.dashboard.page import ErrorFields, Page, address, error_status, page_at

LAUNCHES, ASKS = "Launch with", "Repeat this query with hp_tool"
router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a configuration."""

    name: str
    title: str
    text: str = ""
    group: str = ""
    """Group heading: launch commands, or the same query for hp_tool."""
    notes: tuple[str, ...] = ()
    """What the tool does differently, and how much slower it is."""
    lacks: str | None = None
    """Why this tool cannot run the configuration. `text` is then empty."""
    download_href: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage(Page):
    """Ways to run a configuration. If its query is invalid, `error` has the reason and the rest is
    empty.
    """

    heading: str = ""
    subject: str = ""
    details: str = ""
    answer: str = ""
    """The expected result."""
    configuration_href: str | None = None
    warning: str | None = None
    """Why the default tool of its framework or engine cannot run it, in words."""
    ways: tuple[Way, ...] = ()
    """The default tool of its framework or engine comes first; tools that cannot run it come last.
    """
    error: ErrorFields | None = None


@page_at(router, "/run", template="run.html", section="Ask", status=error_status)
def ways_context(
    query: QueryText, request: Request, find: FindDep, calibrations: CalibrationsDep
) -> RunPage:
    """Return the launch commands of a configuration for each tool."""
    json_href = address("/run.json", {"query": query})
    try:
        parsed = read_query(query.encode(), find=find)
        view, estimate = configuration_view(parsed, calibrations=calibrations, with_fixes=False)
        assert estimate.parallel is not None
        this = Configuration(query=parsed, parallel=estimate.parallel)
        server = str(request.base_url).rstrip("/")
        ways = (
            *(_launch_method(this, name) for name in _tools(this.query)),
            *as_text(this.query, server=server, task="estimate"),
        )
    except HpToolError as error:
        return RunPage(title="Run it", json_href=json_href, error=error.as_dict())
    return RunPage(
        title=f"Run {view.heading}",
        json_href=json_href,
        heading=view.heading,
        subject=", ".join(filter(None, (view.subject, view.workload))),
        details=view.details,
        answer=view.answer,
        configuration_href=view.href,
        warning=f"{ways[0].title}: {ways[0].lacks}" if ways[0].lacks else None,
        ways=tuple(sorted(ways, key=lambda way: way.lacks is not None)),
    )


@router.get("/run/{name}", response_class=PlainTextResponse)
def run_file(
    name: str, query: QueryText, request: Request, find: FindDep, calibrations: CalibrationsDep
) -> PlainTextResponse:
    """Return one way to run a configuration, as a file."""
    way = next(
        (
            each
            for each in ways_context(query, request, find, calibrations).ways
            if each.name == name
        ),
        None,
    )
    if way is None or way.lacks is not None:
        raise NotFoundError(
            way.lacks
            if way and way.lacks
            else f"Unknown format {name[:40]!r}; /run lists the formats.",
            field="name",
        )
    return PlainTextResponse(
        way.text, headers={"Content-Disposition": f'attachment; filename="{name}.txt"'}
    )


def _tools(query: Query) -> tuple[str, ...]:
    """Return the formats that can launch a query of this kind, the default format first."""
    runs = (
        query.training.framework
        if query.training
        else query.inference.engine
        if query.inference
        else None
    )
    first = default_format(query.kind, runs)
    return tuple(dict.fromkeys((first.name, *writable(query.kind))))


def _launch_method(this: Configuration, name: str) -> Way:
    title = get_format(name).title or name
    try:
        export = write_configuration(this, name)
    except HpToolError as error:
        return Way(name=name, title=title, lacks=error.message)
    notes = tuple(filter(None, (export.cost_in_words(), *export.notes)))
    return Way(
        name=name,
        title=title,
        text=export.text,
        group=LAUNCHES,
        notes=notes,
        download_href=address(f"/run/{name}", {"query": this.text()}),
    )


def as_text(query: Query, *, server: str, task: str = "recommend") -> tuple[Way, ...]:
    """Return the query as YAML, as a command, as an HTTP request and in Python.

    `task` is recommend or estimate.
    """
    mapping = schema.query_mapping(query)
    body = json.dumps(mapping, ensure_ascii=False)
    assignments = (
        f"{path}={json.dumps(value, ensure_ascii=False)}"
        for path, value in formats.dotted(mapping).items()
    )
    settings = " ".join(f"--set {shlex.quote(assignment)}" for assignment in assignments)
    routes = ("estimates",) if task == "estimate" else ("recommendations", "searches")
    commands = (
        f"hp-tool {task} {settings}",
        *([] if task == "estimate" else [f"hp-tool tune --server {server} {settings}"]),
    )
    posts = (f"curl {server}/v1/{route} --json {shlex.quote(body)}" for route in routes)
    python = f"import hp_tool\n\nanswer = hp_tool.{task}({mapping!r})\nprint(answer)"
    return (
        Way(
            name="yaml",
            title="YAML",
            text=yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True),
            group=ASKS,
        ),
        Way(name="command", title="Command line", text="\n".join(commands), group=ASKS),
        Way(name="curl", title="curl", text="\n".join(posts), group=ASKS),
        Way(name="python", title="Python", text=python, group=ASKS),
    )
