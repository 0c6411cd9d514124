"""What really ran, beside what the store says: lost, doubled, orphaned and unbooked runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from hp_tool.launchers.jobs import read_json
from hp_tool.store import tables
from hp_tool.store.engine import create_engine


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Each list names what should not be, one line each; `runs` and `searches` are how many there were."""

    searches: int
    runs: int
    lost: list[str] = field(default_factory=list)
    """Results that were written and never stored, searches that were accepted and do not exist, or that a fault ended."""
    doubled: list[str] = field(default_factory=list)
    """Jobs started twice, configurations measured twice in a search, results stored twice, requests carried out twice."""
    orphaned: list[str] = field(default_factory=list)
    """Open runs of ended searches, jobs and processes that the store knows nothing of, or that began after a cancel."""
    unbooked: list[str] = field(default_factory=list)
    """Jobs that took more GPU-seconds than their runs are said to have cost."""


def audit(*, database_url: str, home: Path, accepted: dict[str, str], leftovers: list[str]) -> Audit:
    """Compare. `accepted`: search id by idempotency key, as the API answered. `leftovers`: processes still alive."""
    searches, runs, measurements = _stored(database_url)
    told = _ledger(home / "ledger")
    started = Counter(line["job"] for line in told if line["event"] == "started")
    written = {line["job"]: line["step_s"] for line in told if line["event"] == "finished"}
    of_job = {run["job_name"]: run for run in runs}
    found = Audit(searches=len(searches), runs=len(runs))
    cancelled = {search["id"] for search in searches if search["state"] == "cancelled"}

    of_run = Counter(row["run_id"] for row in measurements)
    step_s = {row["run_id"]: row["step_s"] for row in measurements}
    for job, seconds in written.items():
        if read_json(home / "runs" / job / "result.json") is None:
            continue  # it died between the ledger's line and the rename
        run = of_job.get(job)
        if run is None:
            found.orphaned.append(f"job {job} wrote a result for a run that is not stored")
        elif run["search_id"] not in cancelled and (run["state"] != "finished" or step_s.get(run["id"]) != seconds):
            found.lost.append(f"job {job} measured {seconds} s; the store says {run['state']}, {step_s.get(run['id'])} s")
    found.lost.extend(f"run {run['id']} is finished without a measurement" for run in runs if _unmeasured(run, of_run))
    ids = {search["id"] for search in searches}
    found.lost.extend(f"search {given} was accepted and is gone" for given in accepted.values() if given not in ids)
    measured = {of_job[job]["search_id"] for job in written if job in of_job}
    asked = {of_job[line["job"]]["search_id"] for line in told if line["event"] == "cancelled"}
    wrong = (s for s in searches if not _answered(s, measured=measured, asked=asked))
    found.lost.extend(f"search {s['id']} is {s['state']}: {s['error']}" for s in wrong)

    found.doubled.extend(f"job {job} was started {n} times" for job, n in started.items() if n > 1)
    found.doubled.extend(f"run {run} was measured {n} times" for run, n in of_run.items() if n > 1)
    finished = Counter((run["search_id"], run["digest"]) for run in runs if run["state"] == "finished")
    found.doubled.extend(f"search {key[0]} measured one configuration {n} times" for key, n in finished.items() if n > 1)
    if len(ids) != len(set(accepted.values())):
        found.doubled.append(f"{len(set(accepted.values()))} searches were asked for, {len(ids)} are stored")

    found.orphaned.extend(f"run {r['id']} is still {r['state']}" for r in runs if r["state"] in ("intended", "submitted"))
    found.orphaned.extend(f"job {job} is not in the store" for job in started if job not in of_job)
    events = [(line["event"], line["job"]) for line in told]
    late = (job for place, (event, job) in enumerate(events) if event == "started" and ("cancelled", job) in events[:place])
    found.orphaned.extend(f"job {job} was started after its search had been cancelled" for job in late)
    found.orphaned.extend(f"process {leftover}" for leftover in leftovers)
    for job in started:
        took, run = _gpu_seconds(home / "runs" / job), of_job.get(job)
        if run is not None and took > (booked := run["gpu_seconds"] or 0.0) + 1e-6:
            found.unbooked.append(f"job {job} took {took:.2f} GPU-seconds; the store says {booked:.2f}")
    return found


def _unmeasured(run: dict[str, Any], measured: Counter[str]) -> bool:
    return run["state"] == "finished" and run["id"] not in measured


def _gpu_seconds(folder: Path) -> float:
    """What a job took by its own account; 0 where it left none."""
    job, ended = read_json(folder / "job.json"), read_json(folder / "ended.json")
    return 0.0 if job is None or ended is None else job["num_gpus"] * (ended.get("wall_s") or 0.0)


def _answered(search: dict[str, Any], *, measured: set[str], asked: set[str]) -> bool:
    """Whether it ended as it should: cancelled where that was asked; that it failed is right where no job came to its end."""
    if search["state"] == "succeeded" or (search["state"] == "cancelled" and search["id"] in asked):
        return True
    return (search["error"] or {}).get("code") == "all_runs_failed" and search["id"] not in measured


def _ledger(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _stored(database_url: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
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
