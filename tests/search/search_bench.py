"""One store, one engine in memory, and coordinators one after the other."""

from __future__ import annotations

import time

import optuna

from hp_tool.loop.calibration import prior_for
from hp_tool.loop.search.account import coverage_runs
from hp_tool.loop.search.coordinator import Coordinator
from hp_tool.loop.search.sampler import CostModelSampler
from hp_tool.loop.search.study import StudyProjection
from hp_tool.loop.search.terms import Site, Timing
from hp_tool.store import open_store
from tests.search.search_engine import MemoryEngine, make_problem


class Bench:
    """One store, one engine, and coordinators one after the other."""

    def __init__(self, tmp_path, **settings):
        self.store = open_store(f"sqlite:///{tmp_path / 'hp.db'}")
        self.problem = make_problem(**settings)
        self.engine = MemoryEngine(problem=self.problem)
        self.storage = optuna.storages.InMemoryStorage()
        self.search_id = self.store.create_search(query={"kind": "training"}).id
        self.reports = []

    def claim(self, lease_s=60.0):
        _, lease = self.store.claim_search(holder="test", lease_s=lease_s, search_id=self.search_id)
        return lease

    def projection(self, storage=None):
        sampler = CostModelSampler(
            table=self.problem.table,
            prior=prior_for(kind="gpu"),
            coverage_runs=coverage_runs(self.problem.settings, prior=prior_for(kind="cpu")),
            seed=0,
        )
        return StudyProjection(
            search_id=self.search_id,
            problem=self.problem,
            sampler=sampler,
            storage=storage or self.storage,
        )

    def coordinator(
        self, lease=None, storage=None, reusable=None, should_release=lambda: False, **timing
    ):
        self.last = self.projection(storage)
        return Coordinator(
            store=self.store,
            launcher=self.engine,
            lease=lease or self.claim(),
            problem=self.problem,
            projection=self.last,
            report=lambda kind, payload: self.reports.append((kind, payload)),
            reusable=reusable,
            should_release=should_release,
            site=Site(),
            timing=Timing(**{"sleep": lambda seconds: None} | timing),
        )

    def runs(self):
        return self.store.runs(search_id=self.search_id)


def wait_for_claim(b):
    for _ in range(200):
        claimed = b.store.claim_search(holder="next", lease_s=60.0, search_id=b.search_id)
        if claimed:
            return claimed[1]
        time.sleep(0.01)
    raise AssertionError("the lease never expired")
