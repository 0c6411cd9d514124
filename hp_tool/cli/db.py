"""`hp-tool db`: manage the database of searches and measurements. `hp-tool doctor`: check the
database and this host.
"""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hp_tool.cli.queries import JsonOption
from hp_tool.extras import require

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        help="sqlite:///FILE or postgresql://...; default HP_DATABASE_URL, else a file in the "
        "user's data folder.",
    ),
]

PRUNE_FLAGS = {
    "days": "--older-than",
    "search_days": "--searches-older-than",
    "searches": "--keep-searches",
    "folder_days": "--folders-older-than",
    "folders": "--keep-folders",
    "measurement_days": "--measurements-older-than",
    "watch_days": "--watches-older-than",
}
"""`db prune` flag for each field of Retention."""

db = typer.Typer(no_args_is_help=True, help="Create, upgrade, back up and copy the database.")


@db.command()
def upgrade(
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Upgrade a SQLite file even if a worker uses it."),
    ] = False,
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upgrade the schema to the newest version, if it is older. A SQLite file is first copied in
    its folder.
    """
    require("search", by="`hp-tool db`")
    from hp_tool import store
    from hp_tool.errors import ConflictError
    from hp_tool.loop.learning.make import outdated_notice
    from hp_tool.store import schema, upgrades

    url = store.database_url(database_url)
    try:
        upgrades.upgrade(url, while_in_use=yes)
    except ConflictError as error:
        if not sys.stdin.isatty():
            raise ConflictError(f"{error.message}, or pass --yes", code=error.code) from None
        typer.confirm(f"{error.message}. Upgrade anyway?", abort=True, err=True)
        upgrades.upgrade(url, while_in_use=True)
    if as_json:
        typer.echo(json.dumps({"database": store.mask_password(url), "current": schema.HEAD}))
    else:
        typer.echo(f"{store.mask_password(url)} has schema {schema.HEAD}")
    with closing(store.open_store(url)) as opened:
        if notice := outdated_notice(opened):
            typer.echo(notice, err=True)


@db.command()
def current(database_url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the schema version of the database, and the version that this hp-tool needs."""
    require("search", by="`hp-tool db`")
    from hp_tool import store
    from hp_tool.store import schema

    url = store.database_url(database_url)
    state = {
        "database": store.mask_password(url),
        "current": schema.current(url),
        "head": schema.HEAD,
    }
    line = (
        f"{state['database']} has schema {state['current'] or 'none'}; this version needs "
        f"{state['head']}"
    )
    typer.echo(json.dumps(state) if as_json else line)


@db.command()
def backup(
    path: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a consistent copy of a SQLite database, even while it is in use."""
    require("search", by="`hp-tool db`")
    from hp_tool import store
    from hp_tool.store import maintenance

    maintenance.backup(url=store.database_url(database_url), path=path)
    typer.echo(json.dumps({"path": str(path)}) if as_json else f"wrote {path}")


@db.command()
def copy(
    source: Annotated[str, typer.Argument(help="Database URL to read.")],
    target: Annotated[str, typer.Argument(help="Database URL to fill; its tables must be empty.")],
    as_json: JsonOption = False,
) -> None:
    """Copy all data from one database to another, such as from SQLite to PostgreSQL."""
    require("search", by="`hp-tool db`")
    from hp_tool.store import maintenance

    rows = maintenance.copy(source=source, target=target)
    line = "copied " + ", ".join(
        f"{number} {name.removeprefix('hp_')}" for name, number in rows.items()
    )
    typer.echo(json.dumps({"rows": rows}) if as_json else line)


@db.command()
def prune(
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            help="Delete events, audit rows, idempotency keys and log excerpts older than this.",
        ),
    ] = None,
    searches_older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            help="Delete searches that ended longer ago, with their runs and folders.",
        ),
    ] = None,
    keep_searches: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Delete ended searches except the newest NUMBER."),
    ] = None,
    folders_older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS", help="Delete folders on this host of runs that ended longer ago."
        ),
    ] = None,
    keep_folders: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="Delete run folders on this host except the newest NUMBER."
        ),
    ] = None,
    measurements_older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            help="Delete measurements older than this. No other flag deletes measurements.",
        ),
    ] = None,
    watches_older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS", help="Delete watched jobs whose last report is older than this."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count what would be deleted, and delete nothing.")
    ] = False,
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete old data as the flags specify, or without flags as the HP_RETENTION_... variables
    specify. Data of the last day, folders of unfinished runs and calibrations are never deleted.
    """
    require("search", by="`hp-tool db`")
    from hp_tool import store as stores
    from hp_tool.domain.retention import Retention
    from hp_tool.errors import InputError
    from hp_tool.loop import tuning
    from hp_tool.loop.tuning import retention

    named = Retention(
        days=older_than,
        search_days=searches_older_than,
        searches=keep_searches,
        folder_days=folders_older_than,
        folders=keep_folders,
        measurement_days=measurements_older_than,
        watch_days=watches_older_than,
    )
    rules = (
        retention.validate_retention(named, names=PRUNE_FLAGS)
        if named
        else retention.retention_settings()
    )
    if not rules:
        variables = ", ".join(retention.VARIABLES.values())
        raise InputError(
            f"no age limit set: pass {', '.join(PRUNE_FLAGS.values())}, or set {variables}"
        )
    url = stores.database_url(database_url)
    with closing(stores.open_store(url)) as store:
        counted = tuning.prune(store=store, database_url=url, retention=rules, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(counted))
        return
    done = "would delete" if dry_run else "deleted"
    amounts = (f"{amount} {name.replace('_', ' ')}" for name, amount in counted.items())
    typer.echo(f"{done} {', '.join(amounts)}")


def doctor(database_url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Check database, folders, profiler, GPUs, Slurm and clusters without changing anything. The
    exit code is 1 if a check fails.
    """
    from hp_tool.cluster.diagnostics import examine

    checks = examine(database_url=database_url)
    passed = all(check.status != "failed" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": passed, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            typer.echo(f"{check.status:8} {check.name:18} {check.detail}")
            if check.fix is not None:
                typer.echo(f"{'':27} -> {check.fix}")
    raise typer.Exit(0 if passed else 1)
