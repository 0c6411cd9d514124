"""A cluster engine in simulated time: its jobs wait, run and end as they are fated, and what befell
each is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement, ProfileRequest
from hp_tool.domain.states import JobState
from hp_tool.errors import LauncherError

Fate = Literal["ok", "crashed", "oom", "slow", "waits", "hangs", "preempted"]
FATES: tuple[Fate, ...] = ("ok", "crashed", "oom", "slow", "waits", "hangs", "preempted")
GPUS = 8
RUN_S, SLOW_S = 3.0, 40.0
STEP_S = 1.25


@dataclass(kw_only=True)
class Job:
    """One submission that the engine accepted."""

    name: str
    search: str
    digest: str
    num_gpus: int
    timeout_s: float
    fate: Fate
    submitted_at: float
    state: JobState = JobState.QUEUED
    wall_s: float = 0.0
    beside: int = 0
    """Open jobs of its search when it was accepted, itself counted."""
    beside_all: int = 0
    """Open jobs of all searches, likewise."""
    twin: bool = False
    """Another job of the same configuration was open then."""
    too_late: bool = False
    """Its search had been cancelled by then."""
    is_lost: bool = False

    @property
    def starts_at(self) -> float:
        return self.submitted_at + (SLOW_S if self.fate == "waits" else 0.0)

    def advance(self, now: float) -> None:
        """Bring its state up to date."""
        if not self.state.is_open:
            return
        runs_s = min({"slow": SLOW_S, "hangs": float("inf")}.get(self.fate, RUN_S), self.timeout_s)
        self.wall_s = min(max(now - self.starts_at, 0.0), runs_s)
        if now >= self.starts_at:
            self.state = JobState.RUNNING
        if now >= self.starts_at + runs_s:
            self.state = JobState.PREEMPTED if self.fate == "preempted" else JobState.FINISHED

    def measurement(self) -> Measurement:
        """What its folder tells once it has ended."""
        if self.state is not JobState.FINISHED:
            return Measurement(
                status="preempted", wall_s=self.wall_s, cause=f"the engine says {self.state}"
            )
        if self.fate in ("crashed", "oom", "hangs"):
            status = "timeout" if self.fate == "hangs" else self.fate
            return Measurement(status=status, wall_s=self.wall_s, cause=f"fated: {self.fate}")
        return Measurement(status="ok", step_s=STEP_S, step_times_s=(STEP_S,), wall_s=self.wall_s)


@dataclass(kw_only=True)
class Engine:
    """`Launcher` (hp_tool.domain.ports) in memory, with all that the port promises."""

    now: Callable[[], float]
    is_cancelled: Callable[[str], bool]
    """Of a search, as the store has it."""
    name: str = "simulated"
    jobs: dict[str, Job] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    fates: list[Fate] = field(default_factory=list)
    """Of the jobs to come; those after them are ok."""

    def advance(self) -> list[Job]:
        """All jobs as they are now."""
        for job in self.jobs.values():
            job.advance(self.now())
        return list(self.jobs.values())

    def open(self) -> list[Job]:
        return [job for job in self.advance() if job.state.is_open]

    def lose(self, name: str) -> None:
        """The job dies, and the engine forgets that it was."""
        self.jobs[name].state, self.jobs[name].is_lost = JobState.LOST, True

    def hardware(self) -> Hardware:
        return Hardware(gpu="test-gpu", num_gpus=GPUS)

    def plan(self, request: ProfileRequest, *, job_name: str) -> LaunchPlan:
        return LaunchPlan(
            job_name=job_name,
            command=(configuration_digest(parallel=request.parallel),),
            environment={},
            files={},
            num_gpus=request.num_gpus,
            timeout_s=request.timeout_s,
        )

    def submit(self, plan: LaunchPlan) -> str:
        if plan.job_name in self.jobs or plan.job_name in self.cancelled:
            return plan.job_name
        open_jobs = self.open()
        others = [job for job in open_jobs if job.search == plan.search]
        (digest,) = plan.command
        self.jobs[plan.job_name] = Job(
            name=plan.job_name,
            search=plan.search,
            digest=digest,
            num_gpus=plan.num_gpus,
            timeout_s=plan.timeout_s,
            fate=self.fates.pop(0) if self.fates else "ok",
            submitted_at=self.now(),
            beside=len(others) + 1,
            beside_all=len(open_jobs) + 1,
            twin=any(job.digest == digest for job in others),
            too_late=self.is_cancelled(plan.search),
        )
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        job = self.jobs.get(job_name)
        return None if job is None or job.is_lost else job_name

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        self.advance()
        return {handle: self._state(handle) for handle in handles}

    def _state(self, handle: str) -> JobState:
        job = self.jobs.get(handle)
        return (
            job.state
            if job is not None
            else JobState.CANCELLED
            if handle in self.cancelled
            else JobState.LOST
        )

    def cancel(self, job_name: str) -> None:
        self.advance()
        self.cancelled.add(job_name)
        job = self.jobs.get(job_name)
        if job is not None and job.state.is_open:
            job.state = JobState.CANCELLED

    def open_jobs(self) -> list[str]:
        return [job.name for job in self.open()]

    def output(self, handle: str, *, name: str | None = None) -> str:
        return ""

    def fetch(self, handle: str) -> Measurement:
        self.advance()
        if self._state(handle).is_open:
            raise LauncherError(f"{handle} has not ended")
        job = self.jobs.get(handle)
        if job is None or job.is_lost:
            return Measurement(status="preempted", cause="the engine knows nothing of it")
        return job.measurement()
