"""Sweeps the engines for jobs that no live search owns.

A run that is given up takes its job's name with it: what is submitted late under a cancelled name starts nothing. Jobs slip
through all the same where an engine was away when it was told, where it cannot keep a name, or where a worker died in the
wrong moment; and what a job took in the end is not always known when it is given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from hp_tool.domain.access import AccessStore
from hp_tool.domain.ports import Launcher
from hp_tool.domain.records import JsonObject, RunRecord
from hp_tool.errors import HpToolError, LauncherError
from hp_tool.queries.schema import parse_query
from hp_tool.search.fidelity import num_gpus
from hp_tool.tuning.clusters import cluster_launcher, launcher_name

log = logging.getLogger(__name__)


def engine_of(query: JsonObject) -> Launcher:
    """The launcher over the engine that runs a stored query's jobs."""
    parsed = parse_query(query)
    return cluster_launcher(parsed.cluster, name=launcher_name(parsed))


class Sweeper:
    """Ends stray jobs and books what they took. Several may sweep one engine: to end or to book a job twice changes nothing.

    Only jobs are touched that a run of this store is stored for, whoever else uses the engine; a run is stored before its
    job is submitted, and open for as long as somebody may adopt it.
    """

    def __init__(self, *, store: AccessStore, launcher_of: Callable[[JsonObject], Launcher] = engine_of) -> None:
        self._store, self._launcher_of = store, launcher_of
        self._unbooked: dict[str, dict[str, RunRecord]] = {}
        """Of each cluster, by id: jobs that may not have ended yet."""
        self._booked: set[str] = set()

    def sweep(self) -> None:
        """Look once at every engine that was used of late. One that does not answer is left for the next time."""
        for cluster, query in self._store.engines_in_use().items():
            try:
                self.sweep_engine(cluster, self._launcher_of(query))
            except (HpToolError, OSError) as error:
                log.warning("cannot sweep %s: %s", cluster, error)

    def sweep_engine(self, cluster: str, launcher: Launcher) -> None:
        """End the stray jobs of one engine, and book those that have ended."""
        open_jobs = frozenset(launcher.open_jobs())
        strays = dict(self._unbooked.get(cluster, {}))
        for run in self._store.stray_runs(cluster=cluster, job_names=open_jobs):
            if run.job_name in open_jobs:
                log.warning("job %s belongs to no live search: ended", run.job_name)
                launcher.cancel(run.job_name)
            elif run.id in self._booked:
                continue
            strays[run.id] = run
        self._unbooked[cluster] = {run.id: run for run in strays.values() if not self._book(launcher, run)}

    def _book(self, launcher: Launcher, run: RunRecord) -> bool:
        """Book what the job took by its own account; False where it does not tell yet."""
        try:
            handle = launcher.find(run.job_name)
            measurement = None if handle is None else launcher.fetch(handle)
        except LauncherError:
            return False
        if measurement is not None and measurement.wall_s is not None:
            gpu_seconds = measurement.wall_s * num_gpus(run.parallel, run.fidelity)
            self._store.book_stray(run_id=run.id, gpu_seconds=gpu_seconds)
        self._booked.add(run.id)
        return True
