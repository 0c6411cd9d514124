"""`hp-tool keys`: the service's API keys. Works on the database itself, so the first key needs no key."""

from __future__ import annotations

import getpass
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.cli.db import UrlOption
from hp_tool.cli.queries import JsonOption

if TYPE_CHECKING:
    from hp_tool.domain.access import AccessStore

DAY_S = 86_400.0

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke the service's API keys.")


class ScopeOption(StrEnum):
    """Each includes the ones before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


@keys.command()
def create(
    owner: Annotated[str, typer.Option(help="Whose searches it sees and submits.")],
    scope: Annotated[ScopeOption, typer.Option(help="read: ask and look; submit: spend GPU time; admin: everything.")],
    expires_days: Annotated[float | None, typer.Option(help="Days until it expires; left out: never.")] = None,
    requests_per_second: Annotated[float | None, typer.Option(help="Left out: the service's default.")] = None,
    gpu_seconds_per_day: Annotated[float | None, typer.Option(help="Quota of its searches; left out: none.")] = None,
    database_url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it. It is shown this once; the database keeps a digest."""
    from hp_tool.domain.access import Scope
    from hp_tool.queries.schema import to_json
    from hp_tool.store import open_store
    from service.api.keys import IssuedKey, KeyView
    from service.keys import issue

    with closing(open_store(database_url)) as store:
        record, token = issue(
            store=store,
            owner=owner,
            scope=Scope[scope.name],
            lifetime_s=None if expires_days is None else expires_days * DAY_S,
            requests_per_second=requests_per_second,
            gpu_seconds_per_day=gpu_seconds_per_day,
        )
        _audit(store, "keys create", record.id)
    if as_json:
        typer.echo(to_json(IssuedKey(key=KeyView.of(record), token=token)))
    else:
        typer.echo(token)
        typer.echo(f"key {record.id} of {owner}, scope {scope}. Keep it: it is not shown again.", err=True)


@keys.command("list")
def list_(database_url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show every key, newest first, without secrets."""
    from hp_tool.queries.schema import to_json
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
        end = "revoked" if view.revoked_at else f"until {view.expires_at:%Y-%m-%d}" if view.expires_at else "no end"
        quota = "" if view.gpu_seconds_per_day is None else f"  {view.gpu_seconds_per_day:g} GPU-s a day"
        typer.echo(f"{view.id}  {view.scope:6}  {end:16}  {view.owner}{quota}")


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, its part after hp_; see `keys list`.")],
    database_url: UrlOption = None,
) -> None:
    """Make a key worthless for ever; a running service notices within seconds."""
    from hp_tool.store import open_store

    with closing(open_store(database_url)) as store:
        record = store.revoke_key(key_id=key_id)
        _audit(store, "keys revoke", record.id)
    typer.echo(f"revoked key {record.id} of {record.owner}")


def _audit(store: AccessStore, action: str, key_id: str) -> None:
    """Record the action under the caller's user name on this host: the command line needs no key."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "unknown user"
    store.add_audit(owner=f"{user} (command line)"[:200], api_key_id=None, action=action, resource=key_id, outcome="ok")
