"""`hp-tool report`, `budget` and `cancel`: searches that were submitted, in the database or on a server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.cli.db import UrlOption
from hp_tool.cli.queries import JsonOption

if TYPE_CHECKING:
    from hp_tool.domain.access import AccessStore
    from hp_tool.domain.records import SearchRecord
    from service.api.views import SearchView
    from service.client import Client

SearchArgument = Annotated[str, typer.Argument(metavar="SEARCH", help="A search's id.")]
ServerOption = Annotated[
    str | None, typer.Option("--server", envvar="HP_SERVER", help="Ask this server instead of the database.")
]


def report(
    search: SearchArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; default SEARCH.html.")
    ] = None,
    optuna: Annotated[
        Path | None, typer.Option("--optuna", metavar="FILE", help="Its study as an SQLite file for optuna-dashboard, instead.")
    ] = None,
    database_url: UrlOption = None,
) -> None:
    """Write a search with its charts into one HTML file that opens anywhere, without a server or a network."""
    from hp_tool import store as stores
    from hp_tool.errors import InputError

    url = database_url or stores.database_url()
    with closing(stores.open_store(url)) as store:
        if optuna is not None:
            from hp_tool.tuning.study import copy_study

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
            raise InputError(f"{path} cannot be written: {error.strerror or error}", field="--output") from None
        typer.echo(str(path))


def budget(
    search: SearchArgument,
    runs: Annotated[int | None, typer.Option(help="Maximum profile runs, those already done included.")] = None,
    gpu_seconds: Annotated[float | None, typer.Option(help="Maximum device seconds of them, spent ones included.")] = None,
    server: ServerOption = None,
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a search that has not ended spend more or less; what is left out stays. Its worker follows within seconds."""
    from hp_tool.domain.fields import check_bounds
    from hp_tool.domain.query import SearchSettings
    from hp_tool.errors import InputError
    from hp_tool.queries import schema
    from hp_tool.tuning import daily_limits

    if runs is None and gpu_seconds is None:
        raise InputError("nothing to change: give --runs, --gpu-seconds or both", field="--runs")
    check_bounds(SearchSettings, {"budget_runs": runs, "budget_gpu_seconds": gpu_seconds})

    def in_store(store: AccessStore) -> SearchRecord:
        limits = daily_limits(store.get_search(search_id=search).query)
        return store.change_budget(search_id=search, budget_runs=runs, budget_gpu_seconds=gpu_seconds, limits=limits)

    changed = _changed(
        server,
        database_url,
        on_server=lambda client: client.change_budget(search_id=search, budget_runs=runs, budget_gpu_seconds=gpu_seconds),
        in_store=in_store,
    )
    if as_json:
        typer.echo(schema.to_json(changed))
        return
    settings = changed.query.get("search") or {}
    seconds = settings.get("budget_gpu_seconds")
    bound = "no bound on GPU-seconds" if seconds is None else f"{seconds:g} GPU-seconds"
    typer.echo(f"search {changed.id} ({changed.state}): {settings.get('budget_runs')} runs, {bound}")


def cancel(
    search: SearchArgument,
    server: ServerOption = None,
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a search. A waiting or failed one ends at once, one with runs under way as soon as a worker has ended those."""
    from hp_tool.queries import schema

    cancelled = _changed(
        server,
        database_url,
        on_server=lambda client: client.cancel(search_id=search),
        in_store=lambda store: store.request_cancel(search_id=search),
    )
    if as_json:
        typer.echo(schema.to_json(cancelled))
    else:
        typer.echo(f"search {cancelled.id}: {cancelled.state}" + (", cancel requested" if cancelled.requested else ""))


def _changed(
    server: str | None,
    database_url: str | None,
    *,
    on_server: Callable[[Client], SearchView],
    in_store: Callable[[AccessStore], SearchRecord],
) -> SearchView:
    """The search after a change, made on the server where one is named, else in the database."""
    from hp_tool.errors import InputError
    from hp_tool.store import open_store
    from service.api.views import SearchView
    from service.client import Client

    if server and database_url:
        raise InputError("--server asks a service, which has a database of its own: leave out --database-url", field="--server")
    if server:
        with Client(server=server) as client:
            return on_server(client)
    with closing(open_store(database_url)) as store:
        return SearchView.of(in_store(store))
