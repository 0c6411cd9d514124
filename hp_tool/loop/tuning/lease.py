"""The lease of a search: renew it during the work, and end the search with its result or error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from types import TracebackType

from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.records import Lease, RunRecord
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError, HpToolError, StoreError
from hp_tool.loop.calibration import Calibration
from hp_tool.loop.search.account import Outcome, open_runs, progress_of
from hp_tool.loop.search.charges import end_run
from hp_tool.loop.tuning.result import Account, TuneResult
from hp_tool.loop.tuning.searched import Searched
from hp_tool.questions.schema import to_dict

LEASE_S = 30.0
"""Lease duration in seconds. Other processes wait this long after a coordinator dies. A live
coordinator renews its lease far more often.
"""
PATIENCE_LEASES = 10
"""A coordinator without progress for this many leases counts as stuck and loses its search."""


class Heartbeat:
    """Renew a lease in a separate thread.

    It stops when the context ends, the lease is lost, or there is no progress.
    """

    def __init__(
        self,
        *,
        store: Store,
        lease: Lease,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._lease, self._lease_s, self._clock = store, lease, lease_s, clock
        self._seen = clock()
        self._left = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"heartbeat-{lease.search_id}", daemon=True
        )

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left.set()
        self._thread.join(timeout=self._lease_s)

    def watched(self, question: Callable[[], bool]) -> Callable[[], bool]:
        """Wrap `question` so that each call counts as progress."""

        def asked() -> bool:
            self._seen = self._clock()
            return question()

        return asked

    def _run(self) -> None:
        while not self._left.wait(self._lease_s / 3):
            if self._clock() - self._seen > PATIENCE_LEASES * self._lease_s:
                return
            try:
                self._store.renew_lease(lease=self._lease, lease_s=self._lease_s)
            except ConflictError:  # The worker learns of it at its next write.
                return
            # The database is unreachable at the moment; the lease may last until it is back.
            except StoreError:
                continue


@contextlib.contextmanager
def outcome_stored(
    store: Store, lease: Lease, *, launcher: Callable[[], Launcher | None]
) -> Iterator[None]:
    """Return a context that, on an error, ends or releases the search and its open runs.

    The error is raised again. `launcher` returns the launcher of the runs, or None before there is
    one.
    """
    try:
        yield
    except KeyboardInterrupt:  # Outside the loop, which pauses by itself.
        store.release_search(lease=lease, paused=True)
        raise
    except HpToolError as error:
        # The lease determines who continues.
        if error.code != "lease_lost" and not isinstance(error, StoreError):
            _fail(store, lease, error, launcher=launcher())
        raise
    except Exception as bug:
        from hp_tool.store.base import is_driver_error

        if is_driver_error(
            bug
        ):  # Optuna's tables are in the same database, and it raises the driver's errors unchanged.
            raise StoreError(
                f"The database of Optuna's study failed: {type(bug).__name__}"
            ) from bug
        _fail(store, lease, HpToolError(f"{type(bug).__name__}: {bug}"), launcher=launcher())
        raise


def conclude(
    store: Store,
    lease: Lease,
    problem: Searched,
    outcome: Outcome,
    *,
    calibration: Calibration,
    seconds: float,
    owner: str,
) -> TuneResult:
    """Store the new calibration, and end or release the search with its result.

    Held runs of the owner count only for this result.
    """
    problem.keep(store)
    account = account_of(
        store.runs(search_id=lease.search_id), outcome, search_id=lease.search_id, seconds=seconds
    )
    medians = problem.medians(store, calibration=calibration, runs=account.runs, owner=owner)
    result = medians.result(account)
    budget = problem.query.search.budget_runs
    progress = progress_of(
        account.runs, budget_runs=budget, expected_gain=outcome.expected_gain_fraction
    )
    measurement = result.recommendations[0].measurement if result.recommendations else None
    answer = result.answer and {
        "parallel": asdict(result.answer.parallel),
        "step_s": result.answer.objective_s,
        "source": result.answer.source,
        "measured_s": measurement.measured_s if measurement else None,
    }
    store.set_progress(
        lease=lease,
        progress=progress | {"grid_gpu_seconds": result.search.grid_gpu_seconds, "answer": answer},
    )
    return end(store, lease, result)


def account_of(
    runs: Sequence[RunRecord], outcome: Outcome, *, search_id: str, seconds: float
) -> Account:
    """Return how a search ended: failed if no run succeeded, else as its coordinator reports."""
    error = _nothing_worked(runs) if outcome.state == "succeeded" else None
    return Account(
        search_id=search_id,
        state=SearchState.FAILED if error else SearchState(outcome.state),
        runs=runs,
        stopped_because=outcome.stopped_because,
        seconds=seconds,
        expected_gain_fraction=outcome.expected_gain_fraction,
        error=error,
    )


def end(store: Store, lease: Lease, result: TuneResult) -> TuneResult:
    """End the search with its result, or release a paused one."""
    if result.search.state is SearchState.PAUSED:
        store.release_search(lease=lease, paused=True)
    else:
        record = store.finish_search(
            lease=lease,
            state=result.search.state,
            stopped_because=result.search.stopped_because,
            result=to_dict(result),
            error=result.error,
        )
        if record.state is not result.search.state:  # Cancelled at the last moment.
            search = replace(
                result.search, state=record.state, stopped_because=record.stopped_because or ""
            )
            return replace(result, search=search, error=None)
    return result


def _nothing_worked(runs: Sequence[RunRecord]) -> HpToolError | None:
    """Return the error of a search whose runs all failed.

    It contains the number of runs by status and the last cause.
    """
    measurements = [run.measurement for run in runs if run.measurement is not None]
    if not measurements or any(measurement.status == "ok" for measurement in measurements):
        return None
    counts = Counter(measurement.status for measurement in measurements)
    outcomes = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return HpToolError(
        f"no profile run succeeded ({outcomes}); the last: "
        f"{measurements[-1].cause or 'no cause given'}",
        code="all_runs_failed",
    )


def _fail(store: Store, lease: Lease, error: HpToolError, *, launcher: Launcher | None) -> None:
    """Mark the search as failed (or cancelled, if requested), and end its runs.

    Errors of the store are ignored, because the original error is more useful.
    """
    with contextlib.suppress(HpToolError):
        # A process that lost its lease without noticing must not end jobs.
        store.renew_lease(lease=lease, lease_s=LEASE_S)
        if launcher is not None:
            _end_runs(store, lease, launcher, cause=f"the search ended: {error.code}")
        store.finish_search(
            lease=lease, state=SearchState.FAILED, stopped_because=error.code, error=error.as_dict()
        )


def _end_runs(store: Store, lease: Lease, launcher: Launcher, *, cause: str) -> None:
    """End all open runs.

    If a run's engine or folder does not answer, the run stays open for a later resume or cancel.
    """
    for run in open_runs(store.runs(search_id=lease.search_id)):
        # A bug in the launcher must not leave the search open.
        with contextlib.suppress(Exception):
            end_run(run, store=store, launcher=launcher, lease=lease, cause=cause)
