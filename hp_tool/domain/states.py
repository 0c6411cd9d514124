"""States of searches, runs, outcomes and jobs, with the words and colours that interfaces use for
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

Tone = Literal["good", "warn", "bad", "busy", ""]
"""Colour of a state on pages; empty: neutral."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a state, and how interfaces show it."""

    ended: bool = False
    """Whether the state is an end state, in which no work is left."""
    resumable: bool = False
    """Whether `resume` can queue it again."""
    tone: Tone = ""
    label: str = ""
    """Label on pages; empty: the state's key."""
    happened: str = ""
    """Predicate in a sentence, such as `ran out of memory`; empty: the state's key."""


NO_FACTS = Facts()


class State(StrEnum):
    """A state. Its key is its value in the database and in JSON."""

    ended: bool
    resumable: bool
    tone: Tone
    label: str
    happened: str

    def __new__(cls, key: str, facts: Facts = NO_FACTS) -> Self:
        """Create a member: a string with the facts as attributes."""
        member = str.__new__(cls, key)
        member._value_ = key
        member.ended, member.resumable, member.tone = facts.ended, facts.resumable, facts.tone
        member.label, member.happened = facts.label or key, facts.happened or key
        return member

    @property
    def is_open(self) -> bool:
        """Whether work is left to do."""
        return not self.ended

    @property
    def final(self) -> bool:
        """Whether the state is permanent, so that it cannot be resumed."""
        return self.ended and not self.resumable

    @property
    def failed(self) -> bool:
        """Whether it is an end state without a result."""
        return self.ended and self.tone != "good"


class SearchState(State):
    """State of a search. SUCCEEDED and CANCELLED are final. A failed search can be resumed or
    cancelled.
    """

    QUEUED = "queued"
    """Waiting for a coordinator."""
    RUNNING = "running", Facts(tone="busy")
    """Claimed by a coordinator. If its lease has expired, another coordinator may claim the
    search.
    """
    PAUSED = "paused", Facts(tone="warn", resumable=True)
    """Waiting until it is resumed or claimed by its id."""
    SUCCEEDED = "succeeded", Facts(tone="good", ended=True)
    FAILED = "failed", Facts(tone="bad", ended=True, resumable=True)
    CANCELLED = "cancelled", Facts(ended=True, happened="was cancelled")


class RunState(State):
    """State of a profile run."""

    INTENDED = "intended", Facts(happened="has not started")
    """Stored before the job is submitted. After a crash, the job is found by its name."""
    SUBMITTED = "submitted", Facts(tone="busy", label="running", happened="has not ended")
    """Accepted by the engine, which returned a `handle`."""
    FINISHED = "finished", Facts(ended=True)
    """Has a measurement and never runs again."""
    ABANDONED = "abandoned", Facts(ended=True, happened="was abandoned")
    """Ended without information about the configuration (preempted, lost, cancelled). The
    configuration may run again.
    """


class Outcome(State):
    """Outcome of a finished run: `MeasurementStatus` with its facts."""

    OK = "ok", Facts(ended=True, tone="good")
    OOM = "oom", Facts(ended=True, tone="warn", happened="ran out of memory")
    TIMEOUT = "timeout", Facts(ended=True, tone="warn", happened="did not end in time")
    CRASHED = "crashed", Facts(ended=True, tone="bad")
    PREEMPTED = "preempted", Facts(ended=True, happened="was taken off")


RUN_STATES: dict[str, RunState | Outcome] = {
    str(state): state for kind in (RunState, Outcome) for state in kind
}
"""States shown for runs in lists and on pages, by key."""


class Phase(State):
    """Phase of a running job, parsed from its log.

    `happened` is a template with the placeholders `warmup`, `steps` (number of steps done) and
    `of_steps` (maximum).
    """

    QUEUED = "queued", Facts(label="waiting", happened="waiting for devices")
    START_UP = "start-up", Facts(label="starting", happened="starting up")
    WARM_UP = "warm-up", Facts(label="warming up", happened="warming up, {warmup} done")
    STEPS = "steps", Facts(label="measuring", happened="measuring, step {steps} of {of_steps}")
    RUNNING = "running"
    """Running, but without steps in its log."""


class JobState(State):
    """State of a job, independent of the engine's terms."""

    QUEUED = "queued"
    """Accepted and waiting for devices."""
    RUNNING = "running"
    """Running on devices."""
    FINISHED = "finished", Facts(ended=True)
    """Ended by itself or at its time limit; fetch() returns the result."""
    PREEMPTED = "preempted", Facts(ended=True)
    """Ended by the engine for a reason other than the configuration."""
    CANCELLED = "cancelled", Facts(ended=True)
    """Ended on request."""
    LOST = "lost", Facts(ended=True)
    """Unknown to the engine and without a result."""
