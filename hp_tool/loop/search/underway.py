"""Progress of running jobs from their logs: phase, steps, and last lines."""

import contextlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from hp_tool.domain.ports import Launcher
from hp_tool.domain.records import JsonObject, RunRecord
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.states import JobState, Phase
from hp_tool.domain.steps import RUN_PREFIX, read_steps
from hp_tool.errors import LauncherError

EVERY_S = 2.0
SHARE = 0.05
"""Maximum fraction of a coordinator's time that is spent reading logs from slow engines."""
LINES, LINE_CHARACTERS = 12, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Underway:
    """Progress of a job."""

    phase: Phase
    warmup_steps: int = 0
    steps: int = 0
    """Number of measured steps so far."""
    step_s: float | None = None
    """Median time of the measured steps in seconds, else of the warm-up steps."""
    log_tail: str = ""


class Watched:
    """Read the logs of running jobs at intervals."""

    def __init__(self, *, launcher: Launcher, clock: Callable[[], float]) -> None:
        self._launcher, self._clock, self._next = launcher, clock, -float("inf")
        self.jobs: JsonObject = {}
        """`Underway` as JSON, by run id."""

    def look(self, handles: Mapping[str, RunRecord], states: Mapping[str, JobState]) -> bool:
        """Read the logs if the interval has passed. Return True if any job has made progress."""
        if (started := self._clock()) < self._next:
            return False
        before = self.jobs
        # Otherwise, it shows the last known state.
        with contextlib.suppress(LauncherError, OSError):
            self.jobs = {
                handles[handle].id: asdict(self._one(handle, handles[handle], state))
                for handle, state in states.items()
                if state.is_open
            }
        self._next = self._clock() + max(EVERY_S, (self._clock() - started) / SHARE)
        return self.jobs != before

    def _one(self, handle: str, run: RunRecord, state: JobState) -> Underway:
        if state is JobState.QUEUED:
            return Underway(phase=Phase.QUEUED)
        log = self._launcher.output(handle)
        return parse_progress(log, serves=isinstance(run.parallel, ServingConfig))


def parse_progress(log: str, *, serves: bool) -> Underway:
    """Return a running job's progress from its log.

    If `serves`, the job answers requests and logs no steps.
    """
    lines = [
        line[:LINE_CHARACTERS]
        for line in log.splitlines()
        if line.strip() and not line.startswith(RUN_PREFIX)
    ]
    tail = "\n".join(lines[-LINES:])
    warmup_s, times_s, _ = read_steps(log)
    if serves or not (warmup_s or times_s):
        return Underway(
            phase=Phase.RUNNING if serves and RUN_PREFIX in log else Phase.START_UP, log_tail=tail
        )
    return Underway(
        phase=Phase.STEPS if times_s else Phase.WARM_UP,
        warmup_steps=len(warmup_s),
        steps=len(times_s),
        step_s=statistics.median(times_s or warmup_s),
        log_tail=tail,
    )
