"""`hp-tool tune QUERY`: run a search with real profile runs, in this process or on a server."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hp_tool.cli import queries
from hp_tool.cli.server import connect
from hp_tool.errors import InputError
from hp_tool.extras import require

if TYPE_CHECKING:
    from hp_tool.cli.search_output import SearchProgress
    from hp_tool.domain.query import Query
    from hp_tool.loop.tuning import TuneResult


def tune(
    query: queries.QueryArgument = None,
    launcher: Annotated[
        Literal["local", "slurm", "ray", "kubernetes", "endpoint"] | None,
        typer.Option(help="Launcher that starts the runs."),
    ] = None,
    budget_runs: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of profile runs.")
    ] = None,
    settings: queries.Setting = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Continue this search instead of starting a new search."),
    ] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Use earlier measurements instead of repeating runs.")
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(envvar="HP_SERVER", help="URL of a service whose workers run the search."),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="With --server: https URL to notify when the search ends."
        ),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Print the Pareto front of step time against memory.")
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Print the expected cost of the search and its first job, and stop."
        ),
    ] = False,
    as_json: queries.JsonOption = False,
) -> None:
    """Find the best configuration with a few real runs. Ctrl-C pauses a search in this process, and
    --resume continues it. A search on a server keeps running.
    """
    require("search", by="`hp-tool tune`")
    from hp_tool.cli.search_output import SearchProgress, print_result
    from hp_tool.questions import schema

    flags: dict[str, Any] = {
        "launcher": launcher,
        "budget_runs": budget_runs,
        "reuse": reuse or None,
    }
    changes = {name: value for name, value in flags.items() if value is not None}
    if resume is not None and (query is not None or settings or changes):
        raise InputError(
            "a resumed search has its own query; remove QUERY and the other options, or "
            "remove --resume",
            field="--resume",
        )
    if webhook is not None and (not server or resume is not None):
        raise InputError(
            "--webhook requires --server and a new search; remove --resume",
            field="--webhook",
        )
    parsed = None
    if resume is None:
        parsed = queries.read_query(query, {}, settings)
        parsed = replace(parsed, search=replace(parsed.search, **changes))
    if plan:
        if parsed is None:
            raise InputError(
                "--plan is for new searches only; pass a query, and remove --resume",
                field="--plan",
            )
        _print_plan(parsed, as_json=as_json, server=server)
        return
    with SearchProgress() as progress:
        if server:
            result = _run_on_server(
                parsed, resume=resume, progress=progress, server=server, webhook=webhook
            )
        else:
            result = _run_in_process(parsed, resume=resume, progress=progress)
    if as_json:
        typer.echo(schema.to_json(result))
    else:
        print_result(result, pareto=pareto, query=parsed)
    if result.status == "error":
        raise typer.Exit(1)
    if not result.recommendations:
        raise typer.Exit(3)


def _print_plan(query: Query, *, as_json: bool, server: str | None) -> None:
    """Print the estimated cost and, if this process would run the search, the first job."""
    from hp_tool.cli.search_output import plan_lines
    from hp_tool.domain.plan import PlanAnswer
    from hp_tool.loop.tuning.plan import plan_search
    from hp_tool.questions import schema

    if server:
        with connect(server) as client:
            answer: PlanAnswer = schema.parse(PlanAnswer, client.plan(query=schema.to_dict(query)))
    else:
        from hp_tool.store import database_url, open_store

        with closing(open_store(database_url())) as store:
            answer = plan_search(query, store=store)
    if as_json:
        typer.echo(schema.to_json(answer))
    else:
        typer.echo(
            "\n".join((*plan_lines(answer.plan), *(() if answer.job is None else ("", answer.job))))
        )


def _run_in_process(
    query: Query | None, *, resume: str | None, progress: SearchProgress
) -> TuneResult:
    from hp_tool.loop import tuning
    from hp_tool.store import database_url, open_store

    if query is not None:
        _calibrate_host(query)
    url = database_url()
    with closing(open_store(url)) as store:
        return tuning.tune(
            query=query,
            store=store,
            storage=tuning.study_storage(url),
            search_id=resume,
            on_event=progress.on_event,
        )


def _calibrate_host(query: Query) -> None:
    """Benchmark this host's CPU before its first search, and store the fitted constants.

    With the constants of another CPU, predictions are off by a factor of several.
    """
    from hp_tool import catalog
    from hp_tool.catalog.efficiency import machine_profile, save_machine_profile
    from hp_tool.cluster.launchers.local import LocalLauncher
    from hp_tool.errors import HpToolError
    from hp_tool.loop.learning import machine
    from hp_tool.loop.tuning.clusters import create_launcher

    cluster = catalog.cluster(query.cluster)
    if (
        query.kind != "training"
        or query.trainer
        or cluster.gpu.kind != "cpu"
        or machine_profile(cluster.name)
    ):
        return
    launcher = create_launcher(query)
    if not isinstance(launcher, LocalLauncher) or launcher.hardware().num_gpus < cluster.num_gpus:
        return
    typer.echo("benchmarking this host's processor (only once, takes seconds) ...", err=True)
    precision = query.training.precision if query.training is not None else "fp32"
    try:
        timed = machine.checked_precisions([precision], gpu=cluster.gpu)
        report, _ = machine.benchmark_machine(cluster=cluster, launcher=launcher, precisions=timed)
        path = save_machine_profile(cluster.name, report.profile)
    except (
        HpToolError,
        OSError,
    ) as error:  # The search corrects its predictions by its own runs anyway.
        typer.echo(
            f"benchmark failed: {error}; the first predictions use constants of another processor "
            "and are often wrong by a factor of 3 to 10",
            err=True,
        )
        return
    typer.echo(
        f"measured in {report.wall_s:.0f} s, stored in {path}; delete this file to measure again",
        err=True,
    )


def _run_on_server(
    query: Query | None,
    *,
    resume: str | None,
    progress: SearchProgress,
    server: str,
    webhook: str | None,
) -> TuneResult:
    from hp_tool.loop.tuning import TuneResult
    from hp_tool.questions import schema

    with connect(server) as client:
        search_id = resume
        if query is not None:
            search_id = client.submit_search(query=schema.query_mapping(query), webhook=webhook).id
            progress.on_event(
                "started", {"search_id": search_id, "budget_runs": query.search.budget_runs}
            )
        assert search_id is not None  # Without --resume, there is always a query.
        if resume is not None and client.search(search_id=resume).state.resumable:
            client.resume(search_id=resume)
        answer = client.wait(
            search_id=search_id, on_event=lambda event: progress.on_event(event.kind, event.payload)
        )
    result: TuneResult = schema.parse(TuneResult, answer)
    return result
