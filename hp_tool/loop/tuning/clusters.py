"""Launchers of searches, limits of registered clusters, and cleanup of stray jobs."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Literal

from hp_tool import catalog
from hp_tool.catalog.hardware import cluster_name, cluster_runs
from hp_tool.cluster import launchers
from hp_tool.cluster.trainers.command import trainer_of
from hp_tool.cluster.trainers.runs import TrainerLauncher
from hp_tool.domain.access import AccessStore
from hp_tool.domain.hardware import ClusterQuery, ClusterRuns, GpuSpec
from hp_tool.domain.ports import Launcher
from hp_tool.domain.query import Query
from hp_tool.domain.records import GpuSecondsLimit, JsonObject, OpenRunsLimit, RunRecord
from hp_tool.errors import HpToolError, InputError, LauncherError, StoreError, UnsupportedError
from hp_tool.extras import require
from hp_tool.loop.search.fidelity import num_gpus
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import TrainingProblem

LOCAL = "local"
ENDPOINT: Literal["endpoint"] = "endpoint"
"""Name of the launcher for a running server, and of the runner of its runs."""
log = logging.getLogger(__name__)


def launcher_name(query: Query) -> str:
    """Return the launcher name: the query's, else its registered cluster's, else this host's."""
    runs = cluster_runs(query.cluster)
    return query.search.launcher or (runs.launcher if runs is not None else LOCAL)


def check_profiled(gpu: GpuSpec) -> None:
    """Check that the profiler can run on the device.

    Raises:
        UnsupportedError: The device is predict-only.
    """
    if gpu.predict_only:
        raise UnsupportedError(
            f"The profiler does not support {gpu.name}, which is predict-only. Use `hp-tool "
            "recommend`, or set `trainer` to a command that trains there.",
            field="cluster.gpu",
        )


def create_launcher(query: Query) -> Launcher:
    """Create the launcher of a query's runs.

    `cpu` queries run on this host's cores even if it has GPUs.

    Raises:
        MissingExtraError: Jobs would run on this host, and a package is missing.
    """
    name = launcher_name(query)
    if name == LOCAL and query.trainer is None:
        require("profiler", by="a profile run on this host")
    return cluster_launcher(query.cluster, name=name)


def with_trainer(query: Query, launcher: Launcher, *, problem: TrainingProblem) -> Launcher:
    """Wrap the launcher to run the query's own command, if there is one."""
    trainer = trainer_of(query)
    return (
        launcher
        if trainer is None
        else TrainerLauncher(launcher, trainer=trainer, problem=problem, settings=query.search)
    )


def cluster_launcher(cluster: str | ClusterQuery, *, name: str | None = None) -> Launcher:
    """Return the launcher `name` for a cluster.

    The default is the launcher in the cluster's entry, else this host's.

    Options come from the cluster's entry if it names that launcher, else from the launcher's own
    file.
    """
    runs, spec = cluster_runs(cluster), catalog.cluster(cluster)
    name = name or (runs.launcher if runs is not None else LOCAL)
    if name == LOCAL:
        return launchers.create(name, **({"cpu_only": True} if spec.gpu.kind == "cpu" else {}))
    if runs is None or runs.launcher != name or not runs.options:
        return launchers.create(name)
    whole = catalog.cluster(cluster_name(cluster) or cluster)
    node = {
        "gpu": whole.gpu.name,
        "gpus_per_node": whole.gpus_per_node,
        "max_nodes": whole.num_nodes,
    }
    return launchers.create(name, options={"name": whole.name, **node, **runs.options})


def within_limits(query: JsonObject, *, ceiling: float | None = None) -> JsonObject:
    """Return the query to store, with a GPU-second budget if its cluster or `ceiling` sets one.

    The result depends only on settings, not on the remaining daily quota, so repeated requests are
    equal.

    Raises:
        InputError: The query exceeds `ceiling` (`gpu_seconds_ceiling`), or has more parallel runs
            than the cluster allows.
    """
    runs, search = _runs_of(query), query.get("search") or {}
    if runs is not None and (search.get("parallel_runs") or 1) > runs.max_concurrent_runs:
        raise InputError(
            f"parallel_runs {search['parallel_runs']} exceeds the {runs.max_concurrent_runs} "
            f"concurrent runs that cluster {_name_of(query)} allows; lower it",
            field="search.parallel_runs",
        )
    bounds = [
        ceiling,
        *(
            (runs.max_gpu_seconds_per_search, runs.max_gpu_seconds_per_day)
            if runs is not None
            else ()
        ),
    ]
    most = min((each for each in bounds if each is not None), default=None)
    if most is None:
        return query
    budget = search.get("budget_gpu_seconds")
    if budget is not None and budget > most:
        raise InputError(
            f"budget_gpu_seconds {budget:g} exceeds the limit of {most:g} per search; lower it",
            field="search.budget_gpu_seconds",
            code="gpu_seconds_ceiling",
        )
    return query | {"search": search | {"budget_gpu_seconds": most if budget is None else budget}}


def daily_limits(query: JsonObject) -> tuple[GpuSecondsLimit, ...]:
    """Return the daily limits of the query's cluster, which apply to all searches together."""
    runs = _runs_of(query)
    if runs is None or runs.max_gpu_seconds_per_day is None:
        return ()
    return (GpuSecondsLimit(per_day=runs.max_gpu_seconds_per_day, cluster=_name_of(query)),)


def _name_of(query: JsonObject) -> str | None:
    cluster = query.get("cluster")
    name = cluster.get("node_type") if isinstance(cluster, dict) else cluster
    return name if isinstance(name, str) else None


def _runs_of(query: JsonObject) -> ClusterRuns | None:
    name = _name_of(query)
    return None if name is None else cluster_runs(name)


def runs_limit(query: Query) -> OpenRunsLimit | None:
    """Return the maximum concurrent runs on the query's registered cluster; None if unlimited."""
    runs, name = cluster_runs(query.cluster), cluster_name(query.cluster)
    return (
        None
        if runs is None or name is None
        else OpenRunsLimit(cluster=name, runs=runs.max_concurrent_runs)
    )


def engine_of(query: JsonObject) -> Launcher:
    """Return the launcher of a stored query's jobs."""
    parsed = parse_query(query)
    return cluster_launcher(parsed.cluster, name=launcher_name(parsed))


class Sweeper:
    """End stray jobs, which no live search owns, and record their GPU-seconds.

    When a run is given up, its job name is blocked, so that a late submission under that name
    starts nothing. A job can still survive if the engine was unreachable during the cancel, if the
    engine cannot block names, or if a worker died between two steps. The final cost of a job is not
    always known when its run is given up.

    Several sweepers may use one engine, because ending or recording a job twice has no effect. Only
    jobs of runs in this store are touched. A run is stored before its job is submitted, and stays
    open as long as a coordinator may adopt it.
    """

    def __init__(
        self, *, store: AccessStore, launcher_of: Callable[[JsonObject], Launcher] = engine_of
    ) -> None:
        self._store, self._launcher_of = store, launcher_of
        self._unbooked: dict[str, dict[str, RunRecord]] = {}
        """Jobs that may not have ended, by cluster and id."""
        self._booked: set[str] = set()

    def sweep(self) -> None:
        """Check every recently used engine once.

        Engines that do not answer are left to the next sweep.
        """
        for cluster, query in self._store.engines_in_use().items():
            try:
                self.sweep_engine(cluster, self._launcher_of(query))
            except (HpToolError, OSError) as error:
                log.warning("cannot sweep %s: %s", cluster, error)

    def sweep_engine(self, cluster: str, launcher: Launcher) -> None:
        """End the stray jobs of one engine. Record those that have ended."""
        open_jobs = frozenset(launcher.open_jobs())
        strays = dict(self._unbooked.get(cluster, {}))
        for run in self._store.stray_runs(cluster=cluster, job_names=open_jobs):
            if run.job_name in open_jobs or not run.state.ended:
                log.warning("job %s belongs to no live search: ended", run.job_name)
                with _log_errors(run):
                    launcher.cancel(run.job_name)
            elif run.id in self._booked:
                continue
            strays[run.id] = run
        self._unbooked[cluster] = {
            run.id: run for run in strays.values() if not self._book(launcher, run)
        }

    def _book(self, launcher: Launcher, run: RunRecord) -> bool:
        """Record the cost of a job as reported by the engine.

        Return False if it is not known yet.
        """
        with _log_errors(run):
            handle = launcher.find(run.job_name)
            try:
                measurement = None if handle is None else launcher.fetch(handle)
            except LauncherError:  # It has not ended yet.
                return False
            wall_s = 0.0 if measurement is None else measurement.wall_s or 0.0
            if wall_s or not run.state.ended:
                self._store.book_stray(
                    run_id=run.id, gpu_seconds=wall_s * num_gpus(run.parallel, run.fidelity)
                )
            self._booked.add(run.id)
            return True
        return False


@contextlib.contextmanager
def _log_errors(run: RunRecord) -> Iterator[None]:
    """Log an error of one job, so that other jobs do not wait. Database errors are raised.

    The next sweep retries the job.
    """
    try:
        yield
    except StoreError:
        raise
    except (HpToolError, OSError) as error:
        log.warning("cannot end or book job %s: %s", run.job_name, error)
