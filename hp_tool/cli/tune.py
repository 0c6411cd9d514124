"""`hp-tool tune QUERY`: a search with real profile runs, in this process or on a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hp_tool.cli import queries
from hp_tool.errors import InputError

if TYPE_CHECKING:
    from hp_tool.cli.progress import SearchProgress
    from hp_tool.domain.query import Query
    from hp_tool.tuning import TuneResult

Resume = Annotated[str | None, typer.Option(metavar="ID", help="Go on with this search instead of beginning one.")]


def register(app: typer.Typer) -> None:
    """Add `tune` to the command line."""
    app.command()(tune)


def tune(
    query: queries.QueryArgument = None,
    launcher: Annotated[Literal["local", "slurm", "ray", "kubernetes"] | None, typer.Option(help="Where the runs go.")] = None,
    budget_runs: Annotated[int | None, typer.Option(min=1, help="Profile runs at most.")] = None,
    settings: queries.Setting = None,
    resume: Resume = None,
    reuse: Annotated[bool, typer.Option("--reuse", help="Earlier measurements of the same thing stand for runs.")] = False,
    server: Annotated[str | None, typer.Option(envvar="HP_SERVER", help="Let this server's workers search.")] = None,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="https URL that the server tells when the search ends; with --server.")
    ] = None,
    pareto: Annotated[bool, typer.Option("--pareto", help="Show what nothing beats in both step time and memory.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the job that one run would be, and stop.")] = False,
    as_json: queries.JsonOption = False,
) -> None:
    """Find the best configuration with a few real runs. Interrupted, it pauses, unless a server runs it; --resume goes on."""
    from hp_tool.cli.progress import SearchProgress
    from hp_tool.cli.tuned import print_result
    from hp_tool.queries import schema

    changes = {"search.launcher": launcher, "search.budget_runs": budget_runs, "search.reuse": reuse or None}
    given = {name: value for name, value in changes.items() if value is not None}
    if resume is not None and (query is not None or settings or given):
        raise InputError("a search that is resumed keeps its query: give --resume alone", field="--resume")
    if webhook is not None and (not server or resume is not None):
        raise InputError("a server tells of a search that it is given: use --server, and no --resume", field="--webhook")
    asked = None if resume is not None else _changed(queries.read_query(query, {}, settings), given)
    if plan:
        if asked is None or server:
            raise InputError("--plan shows a job of this process's own: give a query, and neither --resume nor --server")
        from hp_tool.tuning.run import describe_plan

        typer.echo(describe_plan(asked))
        return
    with SearchProgress() as progress:
        if server:
            result = _on_server(asked, resume=resume, progress=progress, server=server, webhook=webhook)
        else:
            result = _in_process(asked, resume=resume, progress=progress)
    if as_json:
        typer.echo(schema.to_json(result))
    else:
        print_result(result, front=pareto)
    if result.status == "error":
        raise typer.Exit(1)
    if not result.recommendations:
        raise typer.Exit(3)


def _changed(query: Query, given: Mapping[str, object]) -> Query:
    """The query with flags laid over its search settings."""
    settings: dict[str, Any] = {name.removeprefix("search."): value for name, value in given.items()}
    return replace(query, search=replace(query.search, **settings))


def _in_process(query: Query | None, *, resume: str | None, progress: SearchProgress) -> TuneResult:
    from hp_tool import tuning
    from hp_tool.store import database_url, open_store

    url = database_url()
    store = open_store(url)
    try:
        return tuning.tune(
            query=query, store=store, storage=tuning.study_storage(url), search_id=resume, on_event=progress.on_event
        )
    finally:
        store.close()


def _on_server(
    query: Query | None, *, resume: str | None, progress: SearchProgress, server: str, webhook: str | None
) -> TuneResult:
    from hp_tool.queries import schema
    from hp_tool.tuning import TuneResult
    from service.client import Client

    with Client(server=server) as client:
        search_id = resume
        if query is not None:
            search_id = client.submit_search(query=schema.to_dict(query), webhook=webhook).id
            progress.on_event("started", {"search_id": search_id, "budget_runs": query.search.budget_runs})
        assert search_id is not None  # there is a query where there is nothing to resume
        if resume is not None and client.search(search_id=resume).state in ("paused", "failed"):
            client.resume(search_id=resume)
        answer = client.wait(search_id=search_id, on_event=lambda event: progress.on_event(event.kind, event.payload))
    result: TuneResult = schema.parse(TuneResult, answer)
    return result
