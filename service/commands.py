"""Commands of the service. The entry-point group hp_tool.commands registers them.

Imports are inside the functions, so that other commands do not load the web framework.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hp_tool.cli.db import UrlOption
from hp_tool.cli.queries import JsonOption
from hp_tool.cli.server import connect
from hp_tool.domain.units import SECONDS_PER_DAY
from hp_tool.extras import require

if TYPE_CHECKING:
    from hp_tool.domain.access import AccessStore
    from hp_tool.domain.records import SearchRecord
    from service.api.views import SearchView
    from service.client import Client

keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys of the service.")
SearchArgument = Annotated[str, typer.Argument(metavar="SEARCH", help="Id of the search.")]
ScopeName = Literal["read", "submit", "admin"]
"""Names of scopes. Each scope includes those before it."""
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", envvar="HP_SERVER", help="URL of a server to use instead of the database."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the service's commands."""
    app.add_typer(keys, name="keys")
    for command in (report, budget, label, cancel, serve, worker, mcp):
        app.command()(command)


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default HP_HOST, else 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, or 0 for any free port; default HP_PORT, else 8000.")
    ] = None,
    database_url: UrlOption = None,
) -> None:
    """Run the API and the dashboard.

    An address other than loopback needs HP_API_KEY or HP_API_KEY_FILE.
    """
    require("service", by="`hp-tool serve`")
    from service import app
    from service.settings import from_environment

    app.serve(settings=from_environment(host=host, port=port, database_url=database_url))


def worker(
    database_url: UrlOption = None,
    lease_s: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Seconds after which another worker may continue the search of a dead one.",
        ),
    ] = 30.0,
    searches_per_cluster: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar="HP_SEARCHES_PER_CLUSTER",
            help="Maximum number of searches that all workers together run on one cluster "
            "(launcher local: on one host).",
        ),
    ] = None,
    searches: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            envvar="HP_SEARCHES_PER_WORKER",
            help="Number of searches that this worker runs at the same time.",
        ),
    ] = 1,
    retention_days: Annotated[
        float | None,
        typer.Option(
            help="Delete events, audit rows and log excerpts after this many days; default "
            "HP_RETENTION_DAYS, else never."
        ),
    ] = None,
) -> None:
    """Claim queued searches from the database and run them.

    SIGTERM returns running searches to the queue. The variables HP_RETENTION_... set which data the
    worker deletes once a day (see `hp-tool db prune`); by default it deletes nothing.
    """
    require("search", by="`hp-tool worker`")
    from hp_tool.loop import tuning
    from service import logs
    from service.settings import log_settings
    from service.worker import work

    form, level = log_settings()
    logs.configure_logging(form=form, level=level)
    work(
        database_url=database_url,
        lease_s=lease_s,
        per_cluster=searches_per_cluster,
        searches=searches,
        retention=tuning.retention_settings(days=retention_days),
    )


def mcp(
    skill: Annotated[
        bool,
        typer.Option(
            "--skill",
            help="Print the path of SKILL.md, which explains the tools to an agent, and exit.",
        ),
    ] = False,
    server: ServerOption = None,
    database_url: UrlOption = None,
) -> None:
    """Serve tools to a language-model agent over standard input and output (Model Context
    Protocol).

    `hp-tool serve` serves the same tools at /mcp.
    """
    from service import agents

    if skill:
        typer.echo(str(agents.SKILL))
        return
    agents.require_sdk()
    from service.agents.server import run_stdio

    run_stdio(server=server, database_url=database_url)


def report(
    search: SearchArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="HTML file to write; default SEARCH.html."
        ),
    ] = None,
    optuna: Annotated[
        Path | None,
        typer.Option(
            "--optuna",
            metavar="FILE",
            help="Write the Optuna study as a SQLite file for optuna-dashboard instead.",
        ),
    ] = None,
    database_url: UrlOption = None,
) -> None:
    """Write a search with its charts to an HTML file that needs no server and no network."""
    require("service", by="`hp-tool report`")
    from hp_tool import store as stores
    from hp_tool.errors import InputError

    url = database_url or stores.database_url()
    with closing(stores.open_store(url)) as store:
        if optuna is not None:
            from hp_tool.loop.tuning.study import copy_study

            store.get_search(search_id=search)
            copy_study(search_id=search, database_url=url, path=optuna)
            typer.echo(str(optuna))
        if output is None and optuna is not None:
            return
        from service.dashboard.report import report_html

        path = output or Path(f"{search}.html")
        text = report_html(store=store, search_id=search)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{path} cannot be written: {error.strerror or error}", field="--output"
            ) from None
        typer.echo(str(path))


def budget(
    search: SearchArgument,
    runs: Annotated[
        int | None, typer.Option(help="Maximum number of profile runs, including finished ones.")
    ] = None,
    gpu_seconds: Annotated[
        float | None,
        typer.Option(help="Maximum GPU-seconds of profile runs, including those already used."),
    ] = None,
    server: ServerOption = None,
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the budget of a search that has not ended.

    An option that you omit changes nothing. The search's worker applies the new budget within
    seconds.
    """
    from hp_tool.domain.fields import check_bounds
    from hp_tool.domain.query import SearchSettings
    from hp_tool.errors import InputError
    from hp_tool.questions import schema

    if runs is None and gpu_seconds is None:
        raise InputError("nothing to change; pass --runs, --gpu-seconds or both", field="--runs")
    check_bounds(SearchSettings, {"budget_runs": runs, "budget_gpu_seconds": gpu_seconds})

    def in_store(store: AccessStore) -> SearchRecord:
        from hp_tool.loop.tuning import daily_limits

        limits = daily_limits(store.get_search(search_id=search).query)
        return store.change_budget(
            search_id=search, budget_runs=runs, budget_gpu_seconds=gpu_seconds, limits=limits
        )

    changed = _apply_change(
        server,
        database_url,
        on_server=lambda client: client.change_budget(
            search_id=search, budget_runs=runs, budget_gpu_seconds=gpu_seconds
        ),
        in_store=in_store,
    )
    if as_json:
        typer.echo(schema.to_json(changed))
        return
    settings = {"budget_runs": SearchSettings().budget_runs} | (changed.query.get("search") or {})
    seconds = settings.get("budget_gpu_seconds")
    bound = "no limit on GPU-seconds" if seconds is None else f"{seconds:g} GPU-seconds"
    typer.echo(f"search {changed.id} ({changed.state}): {settings['budget_runs']} runs, {bound}")


def label(
    search: SearchArgument,
    name: Annotated[str, typer.Option(help="Name of the search.")] = "",
    tag: Annotated[
        list[str] | None, typer.Option(help="Tag; repeat the option for several tags.")
    ] = None,
    note: Annotated[str, typer.Option(help="Note about the search.")] = "",
    server: ServerOption = None,
    database_url: UrlOption = None,
) -> None:
    """Replace the name, tags and note of a search.

    The dashboard's list of searches can be filtered by their words.
    """
    from hp_tool.domain.records import Label
    from hp_tool.questions import schema

    labels = schema.parse(Label, {"name": name, "tags": tag or [], "note": note})
    labelled = _apply_change(
        server,
        database_url,
        on_server=lambda client: client.label(
            search_id=search, name=labels.name, tags=labels.tags, note=labels.note
        ),
        in_store=lambda store: store.label_search(search_id=search, label=labels),
    )
    typer.echo(f"search {labelled.id}: {labelled.label.name or 'no name'}")


def cancel(
    search: SearchArgument,
    server: ServerOption = None,
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a search.

    A waiting or failed search ends at once. A search with running jobs ends as soon as a worker has
    ended them.
    """
    from hp_tool.questions import schema

    cancelled = _apply_change(
        server,
        database_url,
        on_server=lambda client: client.cancel(search_id=search),
        in_store=lambda store: store.request_cancel(search_id=search),
    )
    if as_json:
        typer.echo(schema.to_json(cancelled))
    else:
        typer.echo(
            f"search {cancelled.id}: {cancelled.state}"
            + (", cancel requested" if cancelled.requested else "")
        )


def _apply_change(
    server: str | None,
    database_url: str | None,
    *,
    on_server: Callable[[Client], SearchView],
    in_store: Callable[[AccessStore], SearchRecord],
) -> SearchView:
    """Change a search through the server, if given, or else in the database, and return it."""
    from hp_tool.errors import InputError
    from service.api.views import SearchView

    if server and database_url:
        raise InputError(
            "--server uses the database of the service; remove --database-url",
            field="--server",
        )
    if server:
        with connect(server) as client:
            return on_server(client)
    from hp_tool.store import open_store

    with closing(open_store(database_url)) as store:
        return SearchView.of(in_store(store))


@keys.command()
def create(
    owner: Annotated[str, typer.Option(help="User whose searches the key may see and submit.")],
    scope: Annotated[
        ScopeName,
        typer.Option(help="read: predict and view; submit: also use GPU time; admin: everything."),
    ],
    expires_days: Annotated[
        float | None, typer.Option(help="Days until the key expires; default: never.")
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="Rate limit of the key; default: that of the service.")
    ] = None,
    gpu_seconds_per_day: Annotated[
        float | None,
        typer.Option(
            help="Daily GPU-seconds of the owner's searches with this key; default: no limit."
        ),
    ] = None,
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print it.

    The key is printed only once, because the database stores only its digest.
    """
    require("service", by="`hp-tool keys`")
    from hp_tool.domain.access import Scope
    from hp_tool.questions.schema import to_json
    from hp_tool.store import open_store
    from service.api.keys import IssuedKey, KeyView
    from service.keys import issue

    with closing(open_store(database_url)) as store:
        record, token = issue(
            store=store,
            owner=owner,
            scope=Scope[scope.upper()],
            lifetime_s=None if expires_days is None else expires_days * SECONDS_PER_DAY,
            requests_per_second=requests_per_second,
            gpu_seconds_per_day=gpu_seconds_per_day,
        )
        _audit(store, "keys create", record.id)
    if as_json:
        typer.echo(to_json(IssuedKey(key=KeyView.of(record), token=token)))
    else:
        typer.echo(token)
        typer.echo(
            f"key {record.id} of {owner}, scope {scope}. Store it now: it is not shown again.",
            err=True,
        )


@keys.command("list")
def list_(database_url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List all keys, newest first, without their secrets."""
    require("service", by="`hp-tool keys`")
    from hp_tool.questions.schema import to_json
    from hp_tool.store import open_store
    from service.api.keys import KeyView

    views, cursor = [], None
    with closing(open_store(database_url)) as store:
        while True:
            page = store.list_keys(limit=200, cursor=cursor)
            views += [KeyView.of(record) for record in page.items]
            if (cursor := page.next_cursor) is None:
                break
    if as_json:
        typer.echo(to_json({"items": views}))
        return
    for view in views:
        end = (
            "revoked"
            if view.revoked_at
            else f"until {view.expires_at:%Y-%m-%d}"
            if view.expires_at
            else "no expiry"
        )
        quota = (
            ""
            if view.gpu_seconds_per_day is None
            else f"  {view.gpu_seconds_per_day:g} GPU-s a day"
        )
        typer.echo(f"{view.id}  {view.scope:6}  {end:16}  {view.owner}{quota}")


@keys.command()
def revoke(
    key_id: Annotated[
        str, typer.Argument(help="Id of the key: the part after hp_, as in `keys list`.")
    ],
    database_url: UrlOption = None,
) -> None:
    """Revoke a key permanently.

    A running service rejects the key within seconds.
    """
    require("service", by="`hp-tool keys`")
    from hp_tool.store import open_store

    with closing(open_store(database_url)) as store:
        record = store.revoke_key(key_id=key_id)
        _audit(store, "keys revoke", record.id)
    typer.echo(f"revoked key {record.id} of {record.owner}")


def _audit(store: AccessStore, action: str, key_id: str) -> None:
    """Record the action in the audit log under the user's name, because commands have no key."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # The user of a container may have no name.
        user = "unknown user"
    store.add_audit(
        owner=f"{user} (command line)"[:200],
        api_key_id=None,
        action=action,
        resource=key_id,
        outcome="ok",
    )
