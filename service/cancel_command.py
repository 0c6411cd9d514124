"""`hp-tool cancel SEARCH`: end a search, on a server or in the database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from service.api.views import SearchView


def cancel(
    search: Annotated[str, typer.Argument(metavar="SEARCH", help="A search's id.")],
    server: Annotated[str | None, typer.Option(envvar="HP_SERVER", help="Ask this server instead of the database.")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL; default HP_DATABASE_URL, else the user's SQLite file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The search as a JSON object on stdout.")] = False,
) -> None:
    """Cancel a search. A waiting or failed one ends at once, one with runs under way as soon as a worker has ended those."""
    from hp_tool.errors import InputError
    from hp_tool.queries import schema

    if server and database_url:
        raise InputError("--server asks a service, which has a database of its own: leave out --database-url", field="--server")
    asked = _on_server(server, search) if server else _in_store(database_url, search)
    if as_json:
        typer.echo(schema.to_json(asked))
    else:
        typer.echo(f"search {asked.id}: {asked.state}" + (", cancel requested" if asked.requested else ""))


def _on_server(server: str, search: str) -> SearchView:
    from service.client import Client

    with Client(server=server) as client:
        return client.cancel(search_id=search)


def _in_store(database_url: str | None, search: str) -> SearchView:
    from hp_tool.store import open_store
    from service.api.views import SearchView

    store = open_store(database_url)
    try:
        return SearchView.of(store.request_cancel(search_id=search))
    finally:
        store.close()
