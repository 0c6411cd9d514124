"""`hp-tool doctor`: what works on this host, what does not, and how to fix it."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from hp_tool.cli.db import UrlOption
from hp_tool.cli.queries import JsonOption


def doctor(
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check database, folders, profiler, GPUs, Slurm and clusters without changing anything. Exit 1 if a check fails."""
    from hp_tool.diagnostics import examine

    checks = examine(database_url=database_url)
    passed = all(check.status != "failed" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": passed, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            typer.echo(f"{check.status:8} {check.name:18} {check.detail}")
            if check.mend is not None:
                typer.echo(f"{'':27} -> {check.mend}")
    raise typer.Exit(0 if passed else 1)
