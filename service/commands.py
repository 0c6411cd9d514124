"""The service's commands; hp_tool finds them through the entry-point group hp_tool.commands."""

from __future__ import annotations

from typing import Annotated

import typer

from hp_tool.cli.db import UrlOption
from service.key_commands import keys
from service.search_commands import budget, cancel, report


def register(app: typer.Typer) -> None:
    """Add the service's commands. Imports stay inside: the command line starts without the web framework."""
    app.add_typer(keys, name="keys")
    for command in (report, budget, cancel):
        app.command()(command)

    @app.command()
    def serve(
        host: Annotated[str | None, typer.Option(help="Address to listen on; default HP_HOST, else 127.0.0.1.")] = None,
        port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one; default HP_PORT, else 8000.")] = None,
        database_url: UrlOption = None,
    ) -> None:
        """Run the API and the dashboard. Anything but loopback needs HP_API_KEY or HP_API_KEY_FILE."""
        from service.app import serve
        from service.settings import from_environment

        serve(settings=from_environment(host=host, port=port, database_url=database_url))

    @app.command()
    def worker(
        database_url: UrlOption = None,
        lease_s: Annotated[
            float, typer.Option(min=1.0, help="Seconds after which another worker may take over from one that died.")
        ] = 30.0,
        searches_per_cluster: Annotated[
            int | None,
            typer.Option(
                min=1,
                envvar="HP_SEARCHES_PER_CLUSTER",
                help="Searches that all workers together run on one cluster at most (launcher local: on one host).",
            ),
        ] = None,
        retention_days: Annotated[
            float | None,
            typer.Option(
                min=1.0,
                envvar="HP_RETENTION_DAYS",
                help="Forget events, audit rows and ends of logs older than this; default never.",
            ),
        ] = None,
    ) -> None:
        """Take queued searches from the database and run them. SIGTERM hands the current one back to the queue."""
        from service import logs
        from service.settings import log_settings
        from service.worker import work

        form, level = log_settings()
        logs.configure(form=form, level=level)
        work(database_url=database_url, lease_s=lease_s, per_cluster=searches_per_cluster, retention_days=retention_days)
