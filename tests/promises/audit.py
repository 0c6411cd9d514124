"""What was promised, held against what happened: each function lists the breaches of one promise,
in words.

A promise that a fault suspends (docs/promises.md says which) is held only where that fault did not
happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from hp_tool.domain.states import JobState, RunState, SearchState
from hp_tool.loop.assumptions import assumed
from hp_tool.store.coordination import MAX_LOST_CLAIMS
from tests.promises.world import CLUSTER_RUNS, ENGINE_FAULTS, World

NEXT_OF_RUN = {
    None: {"intended"},
    "intended": {"submitted", "abandoned", "finished"},
    "submitted": {"submitted", "abandoned", "finished"},
    "finished": {"finished"},
    "abandoned": {"abandoned"},
}

GIVEN_UP = ("interrupted", "cancelled", "the search ended", "its search has")
"""Causes of runs that were open when somebody or an error ended their search: measured again if it
is resumed.
"""


def breaches(world: World) -> list[str]:
    """All of them, of a history whose searches have ended."""
    world.engine.advance()
    return [f"{promise.__name__}: {breach}" for promise in PROMISES for breach in promise(world)]


def cancel_is_final(world: World) -> Iterator[str]:
    for search_id in world.cancelled:
        state = world.store.get_search(search_id=search_id).state
        if state is not SearchState.CANCELLED:
            yield f"search {search_id} was cancelled and is {state}"
    if not world.happened & {
        "engine",
        "folder",
    }:  # neither took the mark by which a cancelled name starts nothing
        yield from (
            f"job {job.name} began after its search was cancelled"
            for job in world.engine.jobs.values()
            if job.too_late
        )


def nothing_is_lost(world: World) -> Iterator[str]:
    stored = {search.id: search for search in world.searches()}
    yield from (
        f"search {each} was accepted and is gone" for each in world.accepted if each not in stored
    )
    yield from (
        f"search {each.id} is still {each.state}"
        for each in stored.values()
        if not each.state.ended
    )
    of_job = {run.job_name: run for run in world.runs()}
    for job in world.engine.jobs.values():
        run = of_job.get(job.name)
        if run is None:
            yield f"job {job.name} belongs to no run"
        elif (
            job.state is JobState.FINISHED
            and job.fate in ("ok", "slow", "waits")
            and run.state is not RunState.FINISHED
            and not (run.cause or "").startswith(GIVEN_UP)
            and stored[run.search_id].state is SearchState.SUCCEEDED
            and not world.happened & set(ENGINE_FAULTS)
        ):
            yield f"job {job.name} brought a result; its run is {run.state}: {run.cause}"


def nothing_runs_twice(world: World) -> Iterator[str]:
    done = Counter(
        (run.search_id, run.digest) for run in world.runs() if run.state is RunState.FINISHED
    )
    yield from (f"{what} was measured {times} times" for what, times in done.items() if times > 1)
    if len(world.searches()) != len(world.accepted):
        yield f"{len(world.accepted)} searches were asked for, {len(world.searches())} are stored"
    if not world.happened & set(ENGINE_FAULTS):
        yield from (
            f"job {job.name} ran beside its twin" for job in world.engine.jobs.values() if job.twin
        )


def no_job_is_orphaned(world: World) -> Iterator[str]:
    yield from (f"job {job.name} is still {job.state}" for job in world.engine.open())
    yield from (
        f"run {run.job_name} is still {run.state}" for run in world.runs() if not run.state.ended
    )


def accounting_matches_what_ran(world: World) -> Iterator[str]:
    booked: Counter[str] = Counter()
    for run in world.runs():
        cost = run.gpu_seconds or 0.0
        booked[run.search_id] += cost  # type: ignore[assignment]
        job = world.engine.jobs.get(run.job_name)
        took = 0.0 if job is None else job.wall_s * job.num_gpus
        known = job is None or not job.is_lost
        too_much = cost > took + 1e-6 and not world.happened & set(ENGINE_FAULTS)
        if known and (cost < took - 1e-6 or too_much):
            yield f"job {run.job_name} took {took} GPU-seconds; booked are {cost}"
    for search in world.searches():
        shown = search.progress.get("gpu_seconds", 0.0)
        if abs(shown - booked[search.id]) > 1e-6:
            yield f"search {search.id} shows {shown} GPU-seconds; its runs took {booked[search.id]}"
        result = world.store.get_search(search_id=search.id).result
        if result is not None and abs(result["search"]["gpu_seconds"] - booked[search.id]) > 1e-6:
            yield (
                f"the result of {search.id} says {result['search']['gpu_seconds']}; its runs "
                f"took {booked[search.id]}"
            )


def retries_are_bounded(world: World) -> Iterator[str]:
    tried = Counter((job.search, job.digest) for job in world.engine.jobs.values())
    yield from (
        f"{what} was started {times} times"
        for what, times in tried.items()
        if times > assumed().search.attempts
    )
    for search in world.searches():
        claims = 0
        for event in world.events(search.id):
            is_claim = event.kind == "state" and event.payload.get("state") == "running"
            claims = (
                claims + 1
                if is_claim
                else claims
                if event.kind in ("proposed", "waiting", "pending")
                else 0
            )
            if claims > MAX_LOST_CLAIMS:
                yield f"search {search.id} was claimed {claims} times in a row"


def limits_hold(world: World) -> Iterator[str]:
    if world.happened & set(ENGINE_FAULTS):
        return  # an engine that did not answer runs what it was told to cancel until the sweep
    for job in world.engine.jobs.values():
        if job.beside > world.parallel_runs[job.search] or job.beside_all > CLUSTER_RUNS:
            yield f"job {job.name} ran beside {job.beside} of its search, {job.beside_all} in all"
    done = Counter(run.search_id for run in world.runs() if run.state is RunState.FINISHED)
    for search_id, runs in done.items():
        if runs > world.budgets[search_id]:
            yield (
                f"search {search_id} measured {runs} configurations; its budget was "
                f"{world.budgets[search_id]}"
            )


def events_are_in_order(world: World) -> Iterator[str]:
    for search in world.searches():
        events = world.events(search.id)
        if [event.seq for event in events] != list(range(1, len(events) + 1)):
            yield f"search {search.id} has events {[event.seq for event in events]}"
        states = [event.payload.get("state") for event in events if event.kind == "state"]
        ended = {SearchState.SUCCEEDED, SearchState.CANCELLED}
        yield from (
            f"search {search.id} went from {one} to {two}"
            for one, two in pairwise(states)
            if one in ended and two
        )
        last: dict[str, str] = {}
        for event in events:
            if event.kind == "run":
                before, state = last.get(event.payload["run_id"]), event.payload["state"]
                if state not in NEXT_OF_RUN[before]:
                    yield f"run {event.payload['run_id']} went from {before} to {state}"
                last[event.payload["run_id"]] = state


PROMISES = (
    cancel_is_final,
    nothing_is_lost,
    nothing_runs_twice,
    no_job_is_orphaned,
    accounting_matches_what_ran,
    retries_are_bounded,
    limits_hold,
    events_are_in_order,
)
