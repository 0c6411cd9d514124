"""What really ran, beside what the store says: lost, doubled, orphaned and unbooked runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from hp_tool.cluster.launchers.readback import read_json
from hp_tool.store import open_store, tables
from hp_tool.store.engine import create_engine
from tests.service.faults.accounts import untold, wrong_order, wrong_sums
from tests.service.faults.quick_job import lines_of
from tests.service.faults.receiver import Message


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Each list names what should not be, one line each; `runs` and `searches` are how many there
    were.
    """

    searches: int
    runs: int
    lost: list[str] = field(default_factory=list)
    """Results that were written and never stored, searches that were accepted and do not exist, or
    that a fault ended.
    """
    doubled: list[str] = field(default_factory=list)
    """Jobs started twice, configurations measured twice in a search, results stored twice, requests
    carried out twice.
    """
    orphaned: list[str] = field(default_factory=list)
    """Open runs of ended searches, jobs and processes that the store knows nothing of, or that the
    engine still has.
    """
    uncancelled: list[str] = field(default_factory=list)
    """Searches that went on after a cancel was final, and jobs that began then."""
    unbooked: list[str] = field(default_factory=list)
    """Jobs that took more GPU-seconds than their runs are said to have cost, and sums that are not
    their runs'.
    """
    disordered: list[str] = field(default_factory=list)
    """Events that are missing, doubled or out of order."""
    untold: list[str] = field(default_factory=list)
    """Ends of searches of which the receiver of webhooks heard nothing, or something else."""


KINDS = ("lost", "doubled", "orphaned", "uncancelled", "unbooked", "disordered", "untold")


def audit(
    *,
    database_url: str,
    home: Path,
    accepted: dict[str, str],
    leftovers: list[str],
    told: Sequence[Message] | None = None,
) -> Audit:
    """Compare. `accepted`: search id by idempotency key, as the API answered. `leftovers`:
    processes and jobs still there; `told`: webhooks as they arrived, of searches that asked for
    them.
    """
    searches, runs, measurements = _stored(database_url)
    ledger = lines_of(home / "ledger")
    started = Counter(line["job"] for line in ledger if line["event"] == "started")
    written = {line["job"]: line for line in ledger if line["event"] == "finished"}
    of_job = {run["job_name"]: run for run in runs}
    found = Audit(searches=len(searches), runs=len(runs))
    cancelled = {search["id"] for search in searches if search["state"] == "cancelled"}
    asked = {line["search"] for line in ledger if line["event"] == "cancelled"}
    tuned = [line["search"] for line in ledger if line["event"] == "tuned"]

    of_run = Counter(row["run_id"] for row in measurements)
    step_s = {row["run_id"]: row["step_s"] for row in measurements}
    for job, line in written.items():
        run = of_job.get(job)
        if run is None:
            found.orphaned.append(f"job {job} wrote a result for a run that is not stored")
        elif run["search_id"] not in cancelled and (
            run["state"] != "finished" or step_s.get(run["id"]) != line["step_s"]
        ):
            found.lost.append(
                f"job {job} measured {line['step_s']} s; the store says {run['state']}, "
                f"{step_s.get(run['id'])} s"
            )
    found.lost.extend(
        f"run {run['id']} is finished without a measurement"
        for run in runs
        if _unmeasured(run, of_run)
    )
    ids = {search["id"] for search in searches}
    known = {*accepted.values(), *tuned}
    found.lost.extend(f"search {given} was accepted and is gone" for given in known - ids)
    measured = {of_job[job]["search_id"] for job in written if job in of_job}
    wrong = (s for s in searches if not _answered(s, measured=measured, asked=asked))
    found.lost.extend(f"search {s['id']} is {s['state']}: {s['error']}" for s in wrong)
    found.lost.extend(line["error"] for line in ledger if line["event"] == "tune failed")

    found.doubled.extend(f"job {job} was started {n} times" for job, n in started.items() if n > 1)
    found.doubled.extend(f"run {run} was measured {n} times" for run, n in of_run.items() if n > 1)
    finished = Counter(
        (run["search_id"], run["digest"]) for run in runs if run["state"] == "finished"
    )
    found.doubled.extend(
        f"search {key[0]} measured one configuration {n} times"
        for key, n in finished.items()
        if n > 1
    )
    found.doubled.extend(
        f"search {extra} is stored, and nobody asked for it" for extra in ids - known
    )

    found.orphaned.extend(
        f"run {r['id']} is still {r['state']}"
        for r in runs
        if r["state"] in ("intended", "submitted")
    )
    found.orphaned.extend(f"job {job} is not in the store" for job in started if job not in of_job)
    found.orphaned.extend(leftovers)

    found.uncancelled.extend(f"search {each} was cancelled" for each in asked - cancelled)
    over: set[str] = set()
    for line in ledger:
        if line["event"] == "cancelled":
            over.add(line["search"])
        elif (
            line["event"] == "started"
            and line["job"] in of_job
            and of_job[line["job"]]["search_id"] in over
        ):
            found.uncancelled.append(
                f"job {line['job']} was started after its search had been cancelled"
            )

    for job in started:
        took = max(_gpu_seconds(home / "runs" / job), written.get(job, {}).get("gpu_seconds", 0.0))
        if job in of_job and took > (booked := of_job[job]["gpu_seconds"] or 0.0) + 1e-6:
            found.unbooked.append(
                f"job {job} took {took:.2f} GPU-seconds; the store says {booked:.2f}"
            )
    with closing(open_store(database_url)) as store:
        found.unbooked.extend(wrong_sums(store))
        found.disordered.extend(wrong_order(store))
        found.untold.extend(
            [] if told is None else untold(store, accepted=accepted.values(), told=told)
        )
    return found


def _unmeasured(run: dict[str, Any], measured: Counter[str]) -> bool:
    return run["state"] == "finished" and run["id"] not in measured


def _gpu_seconds(folder: Path) -> float:
    """What a job took by its own account; 0 where it left none."""
    job, ended = read_json(folder / "job.json"), read_json(folder / "ended.json")
    values = ((job or {}).get("num_gpus"), (ended or {}).get("wall_s"))
    return values[0] * values[1] if all(isinstance(value, int | float) for value in values) else 0.0


def _answered(search: dict[str, Any], *, measured: set[str], asked: set[str]) -> bool:
    """Whether it ended as it should: cancelled where that was asked; that it failed is right where
    no job came to its end.
    """
    if search["state"] == "succeeded" or (search["state"] == "cancelled" and search["id"] in asked):
        return True
    return (search["error"] or {}).get("code") == "all_runs_failed" and search["id"] not in measured


def _stored(
    database_url: str,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    engine = create_engine(database_url)
    s, r, m = tables.searches.c, tables.runs.c, tables.measurements.c
    queries = (
        sa.select(s.id, s.state, s.error),
        sa.select(r.id, r.search_id, r.digest, r.state, r.job_name, r.gpu_seconds),
        sa.select(m.run_id, m.step_s).where(m.run_id.is_not(None)),
    )
    try:
        with engine.connect() as connection:
            found = [[dict(row._mapping) for row in connection.execute(query)] for query in queries]
    finally:
        engine.dispose()
    return found[0], found[1], found[2]
