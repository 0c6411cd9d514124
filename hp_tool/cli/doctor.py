"""`hp-tool doctor`: what works on this host, what does not, and the mend."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `doctor` to the command line."""
    app.command(name="doctor")(doctor)


def doctor(
    database_url: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL; default HP_DATABASE_URL, else the user's SQLite file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check database, folders, profiler, GPUs, Slurm and clusters; changes nothing. Exit 1 where something fails."""
    from hp_tool.diagnostics import examine

    checks = examine(database_url=database_url)
    sound = all(check.status != "failed" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": sound, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            typer.echo(f"{check.status:8} {check.name:18} {check.detail}")
            if check.mend is not None:
                typer.echo(f"{'':27} -> {check.mend}")
    raise typer.Exit(0 if sound else 1)
