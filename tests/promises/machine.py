"""Histories of users, workers, a sweep and faults, drawn and shrunk by hypothesis; at the end of
each all promises are held.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test, precondition, rule

from hp_tool.errors import ConflictError
from tests.promises.audit import breaches
from tests.promises.engine import FATES
from tests.promises.world import FAULTS, LEASE_S, World

FEW = st.integers(0, 3)
MOST_SEARCHES, MOST_WORKERS, STEPS = 3, 3, 20


class Histories(RuleBasedStateMachine):
    """One history after another; `count` says how many there were."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.hire()
        self.world.submit(budget_runs=2, parallel_runs=1)

    # Users

    @precondition(lambda self: len(self.world.accepted) < MOST_SEARCHES)
    @rule(budget_runs=st.integers(1, 3), parallel_runs=st.integers(1, 2))
    def submit(self, budget_runs: int, parallel_runs: int) -> None:
        self.world.submit(budget_runs=budget_runs, parallel_runs=parallel_runs)

    @rule(search=FEW)
    def cancel(self, search: int) -> None:
        self.world.cancel(self._search(search))

    @rule(search=FEW)
    def pause(self, search: int) -> None:
        with suppress(ConflictError):
            self.world.store.request_pause(search_id=self._search(search))

    @rule(search=FEW)
    def resume(self, search: int) -> None:
        with suppress(ConflictError):
            self.world.store.resume_search(search_id=self._search(search))

    @rule(search=FEW, budget_runs=st.integers(1, 3))
    def change_budget(self, search: int, budget_runs: int) -> None:
        self.world.change_budget(self._search(search), budget_runs=budget_runs)

    # Processes

    @precondition(lambda self: len(self.world.workers()) < MOST_WORKERS)
    @rule()
    def hire(self) -> None:
        self.world.hire()

    @rule(who=FEW, calls=st.integers(1, 40))
    def work(self, who: int, calls: int) -> None:
        """The others sleep meanwhile."""
        if workers := self.world.workers():
            workers[who % len(workers)].run(calls)

    @rule(calls=st.integers(1, 40))
    def all_work(self, calls: int) -> None:
        self.world.all_work(calls)

    @rule(calls=st.integers(1, 20))
    def sweep(self, calls: int) -> None:
        self.world.processes["sweep"].run(calls)

    @rule(who=FEW)
    def kill(self, who: int) -> None:
        if workers := self.world.workers():
            workers[who % len(workers)].kill()

    @rule(who=FEW)
    def terminate(self, who: int) -> None:
        if workers := self.world.workers():
            workers[who % len(workers)].stopping = True

    @rule(who=FEW)
    def interrupt(self, who: int) -> None:
        """Ctrl-C."""
        if workers := self.world.workers():
            workers[who % len(workers)].kill(KeyboardInterrupt())

    # The world

    @rule(seconds=st.sampled_from([1.0, 5.0, LEASE_S + 1.0, 90.0]))
    def pass_time(self, seconds: float) -> None:
        """All processes sleep."""
        self.world.elapsed_s += seconds

    @rule(hours=st.sampled_from([1.0, -1.0]))
    def set_clock(self, hours: float) -> None:
        self.world.shift_s += hours * 3600.0

    @rule(fate=st.sampled_from(FATES[1:]))
    def fate(self, fate: Any) -> None:
        """Of the next job."""
        self.world.engine.fates.append(fate)

    @rule(fault=st.sampled_from(FAULTS), calls=st.integers(1, 3))
    def break_down(self, fault: str, calls: int) -> None:
        self.world.armed[fault] = calls

    @rule(number=FEW)
    def lose_job(self, number: int) -> None:
        if jobs := self.world.engine.open():
            self.world.engine.lose(jobs[number % len(jobs)].name)

    def teardown(self) -> None:
        try:
            type(self).count += 1
            self.world.drain()
            broken = breaches(self.world)
            assert not broken, "\n".join(broken)
        finally:
            self.world.close()

    def _search(self, number: int) -> str:
        return self.world.accepted[number % len(self.world.accepted)]


def histories(number: int, *, seed: int | None = None) -> None:
    """Hold the promises in so many histories: always the same ones, or others by `seed`. A breach
    is raised with the shortest history that shows it.
    """
    chosen = settings(
        max_examples=number,
        stateful_step_count=STEPS,
        derandomize=seed is None,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    test = get_state_machine_test(Histories, settings=chosen)
    (test if seed is None else seeded(seed)(test))()
