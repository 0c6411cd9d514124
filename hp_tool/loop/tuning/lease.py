"""The lease of a search: renewed beside the work, and given back with what the search learnt, or
the error that ended it.
"""

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
"""A coordinator that died keeps its search from others this long; a living one renews far more
often.
"""
PATIENCE_LEASES = 10
"""A coordinator that shows no sign of life for this many leases has lost its way, and loses its
search.
"""


class Heartbeat:
    """Renews `lease` in a thread of its own until left, lost, or the work beside it stands
    still.
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
        """`question`, which the work asks again and again; each time is a sign of life."""

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
            except (
                ConflictError
            ):  # ended, handed back or taken over: whoever works here learns it at the next write
                return
            except StoreError:  # away for a while; the lease may last until it is back
                continue


@contextlib.contextmanager
def outcome_stored(
    store: Store, lease: Lease, *, launcher: Callable[[], Launcher | None]
) -> Iterator[None]:
    """An error inside ends the search and its open runs, or lets go of it; and is raised.

    `launcher` gives the launcher of the runs; None while there is none yet.
    """
    try:
        yield
    except KeyboardInterrupt:  # outside the loop, which pauses by itself
        store.release_search(lease=lease, paused=True)
        raise
    except HpToolError as error:
        # With another coordinator at work, or the store away, it is not ours to end: the lease
        # decides who goes on.
        if error.code != "lease_lost" and not isinstance(error, StoreError):
            _fail(store, lease, error, launcher=launcher())
        raise
    except Exception as bug:
        from hp_tool.store.base import is_driver_error

        if is_driver_error(
            bug
        ):  # Optuna's tables lie in it too, and it raises the driver's errors as they are
            raise StoreError(f"the study's database: {type(bug).__name__}") from bug
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
    """Keep what was learnt, and end or let go of the search with its result. `owner`: the search's,
    whose own doubted runs count for its result alone.
    """
    problem.keep(store)
    account = account_of(
        store.runs(search_id=lease.search_id), outcome, search_id=lease.search_id, seconds=seconds
    )
    result = problem.result(store, calibration=calibration, account=account, owner=owner)
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
    """How a search ended: failed where none of its runs worked, else as its coordinator says."""
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
    """End the search with its result, or let go of a paused one."""
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
        if record.state is not result.search.state:  # cancelled in the last moment
            search = replace(
                result.search, state=record.state, stopped_because=record.stopped_because or ""
            )
            return replace(result, search=search, error=None)
    return result


def _nothing_worked(runs: Sequence[RunRecord]) -> HpToolError | None:
    """The error of a search whose every run failed: how many of each kind, and the last one's
    cause.
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
    """End the search as failed (the store: as cancelled where that was asked for), and with it its
    runs.

    Where the store itself is the trouble, the error that led here says more.
    """
    with contextlib.suppress(HpToolError):
        # Whoever lost the lease to another, and does not know yet, ends none of its jobs.
        store.renew_lease(lease=lease, lease_s=LEASE_S)
        if launcher is not None:
            _end_runs(store, lease, launcher, cause=f"the search ended: {error.code}")
        store.finish_search(
            lease=lease, state=SearchState.FAILED, stopped_because=error.code, error=error.as_dict()
        )


def _end_runs(store: Store, lease: Lease, launcher: Launcher, *, cause: str) -> None:
    """End all open runs. One whose engine or folder does not answer stays open for whoever resumes
    or cancels the search.
    """
    for run in open_runs(store.runs(search_id=lease.search_id)):
        with contextlib.suppress(
            Exception
        ):  # a bug may lie in the launcher, and must not leave the search unended
            end_run(run, store=store, launcher=launcher, lease=lease, cause=cause)
