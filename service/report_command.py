"""`hp-tool report SEARCH`: a search in one file, or its Optuna study in another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    search: Annotated[str, typer.Argument(metavar="SEARCH", help="A search's id.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; default SEARCH.html.")
    ] = None,
    optuna: Annotated[
        Path | None, typer.Option("--optuna", metavar="FILE", help="Its study as an SQLite file for optuna-dashboard, instead.")
    ] = None,
    database_url: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL; default HP_DATABASE_URL, else the user's SQLite file.")
    ] = None,
) -> None:
    """Write a search with its charts into one HTML file that opens anywhere, without a server or a network."""
    from hp_tool import store as stores
    from hp_tool.errors import InputError

    url = database_url or stores.database_url()
    store = stores.open_store(url)
    try:
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
    finally:
        store.close()
