"""What a search says of the jobs that it has under way."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from hp_tool.domain.states import JobState
from hp_tool.domain.steps import RUN_PREFIX, format_step
from hp_tool.errors import EngineAwayError
from hp_tool.loop.search.underway import LINES, Underway, Watched, parse_progress


def line(number: int, time_s: float) -> str:
    return format_step(number, warmup=(2, 6), time_s=time_s, loss=9.0, norm=1.0)


START = [f"{RUN_PREFIX}{{}}", "building the model"]


@pytest.mark.parametrize(
    ("lines", "phase", "warmup_steps", "steps", "step_s"),
    [
        ([], "start-up", 0, 0, None),
        (START, "start-up", 0, 0, None),
        ([*START, line(1, 3.0)], "warm-up", 1, 0, 3.0),
        ([*START, line(1, 3.0), line(2, 1.0), line(3, 1.0), line(4, 1.2)], "steps", 2, 2, 1.1),
    ],
)
def test_a_log_tells_the_phase(lines, phase, warmup_steps, steps, step_s):
    told = parse_progress("\n".join(lines), serves=False)
    assert (told.phase, told.warmup_steps, told.steps) == (phase, warmup_steps, steps)
    assert told.step_s == (None if step_s is None else pytest.approx(step_s))
    assert RUN_PREFIX not in told.log_tail and told.log_tail == "\n".join(lines[1:])


def test_a_server_writes_no_steps_and_only_the_end_of_a_log_is_kept():
    assert parse_progress("loading", serves=True).phase == "start-up"
    assert parse_progress(START[0], serves=True).phase == "running"
    tail = parse_progress(
        "\n".join(f"{number} {'x' * 1000}" for number in range(100)), serves=False
    ).log_tail.splitlines()
    assert len(tail) == LINES and tail[-1].startswith("99 ") and max(map(len, tail)) == 200


def test_the_coordinator_reads_the_logs_of_its_jobs(bench):
    b = bench(budget_runs=1, min_gain_fraction=0.0)
    seen = []

    def on_poll():
        seen.append(b.store.get_search(search_id=b.search_id).progress.get("underway"))
        for job in b.engine.jobs.values():
            job.state = JobState.RUNNING if len(seen) > 1 else JobState.QUEUED

    b.engine.output, b.engine.on_poll = (
        lambda handle, *, name=None: "\n".join([*START, line(1, 3.0)]),
        on_poll,
    )
    b.coordinator(clock=lambda: 10.0 * len(seen)).run()
    (run,) = b.runs()
    assert seen[0] is None and seen[1][run.id] == asdict(Underway(phase="queued"))
    assert [seen[2][run.id][name] for name in ("phase", "warmup_steps", "steps", "step_s")] == [
        "warm-up",
        1,
        0,
        3.0,
    ]


def test_slow_and_silent_engines_are_seldom_asked(bench):
    b = bench()
    now, run = [0.0], SimpleNamespace(id="r", parallel=None)

    def output(handle):
        now[0] += 1.0
        if now[0] > 50.0:
            raise EngineAwayError("no logs now")
        return line(1, now[0])

    b.engine.output = output
    watched = Watched(launcher=b.engine, clock=lambda: now[0])
    handles, states = {"h": run}, {"h": JobState.RUNNING}
    assert watched.look(handles, states) and now[0] == 1.0
    now[0] = 19.0
    assert not watched.look(handles, states) and now[0] == 19.0, (
        "reading took a second, of which a twentieth is allowed"
    )
    now[0] = 60.0
    before = watched.jobs
    assert not watched.look(handles, states) and watched.jobs == before and now[0] == 61.0
