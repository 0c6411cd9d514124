"""`hp-tool budget SEARCH`: what a search that is under way may spend from now on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from service.api.views import SearchView


def budget(
    search: Annotated[str, typer.Argument(metavar="SEARCH", help="A search's id.")],
    runs: Annotated[int | None, typer.Option(help="Profile runs at most, those that it did already included.")] = None,
    gpu_seconds: Annotated[float | None, typer.Option(help="Device seconds of them at most, spent ones included.")] = None,
    server: Annotated[str | None, typer.Option(envvar="HP_SERVER", help="Ask this server instead of the database.")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL; default HP_DATABASE_URL, else the user's SQLite file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The search as a JSON object on stdout.")] = False,
) -> None:
    """Let a search that has not ended spend more or less; what is left out stays. Its worker follows within seconds."""
    from hp_tool.domain.fields import check_bounds
    from hp_tool.domain.query import SearchSettings
    from hp_tool.errors import InputError
    from hp_tool.queries import schema

    if runs is None and gpu_seconds is None:
        raise InputError("nothing to change: give --runs, --gpu-seconds or both", field="--runs")
    if server and database_url:
        raise InputError("--server asks a service, which has a database of its own: leave out --database-url", field="--server")
    check_bounds(SearchSettings, {"budget_runs": runs, "budget_gpu_seconds": gpu_seconds})
    changed = (
        _on_server(server, search, runs=runs, gpu_seconds=gpu_seconds)
        if server
        else _in_store(database_url, search, runs=runs, gpu_seconds=gpu_seconds)
    )
    if as_json:
        typer.echo(schema.to_json(changed))
        return
    settings = changed.query.get("search") or {}
    seconds = settings.get("budget_gpu_seconds")
    seconds_said = "no bound on GPU-seconds" if seconds is None else f"{seconds:g} GPU-seconds"
    typer.echo(f"search {changed.id} ({changed.state}): {settings.get('budget_runs')} runs, {seconds_said}")


def _on_server(server: str, search: str, *, runs: int | None, gpu_seconds: float | None) -> SearchView:
    from service.client import Client

    with Client(server=server) as client:
        return client.change_budget(search_id=search, budget_runs=runs, budget_gpu_seconds=gpu_seconds)


def _in_store(database_url: str | None, search: str, *, runs: int | None, gpu_seconds: float | None) -> SearchView:
    from hp_tool.store import open_store
    from hp_tool.tuning import daily_limits
    from service.api.views import SearchView

    store = open_store(database_url)
    try:
        limits = daily_limits(store.get_search(search_id=search).query)
        return SearchView.of(
            store.change_budget(search_id=search, budget_runs=runs, budget_gpu_seconds=gpu_seconds, limits=limits)
        )
    finally:
        store.close()
