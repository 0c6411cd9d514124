"""States of searches, runs, outcomes and jobs, with the words and colours in which interfaces show
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
    """Whether no work is left to do."""
    resumable: bool = False
    """Whether `resume` queues it again."""
    tone: Tone = ""
    label: str = ""
    """Label on pages; empty: its key."""
    happened: str = ""
    """Predicate for a sentence, such as `ran out of memory`; empty: its key."""


NO_FACTS = Facts()


class State(StrEnum):
    """A state; its key is its value in the database and in JSON."""

    ended: bool
    resumable: bool
    tone: Tone
    label: str
    happened: str

    def __new__(cls, key: str, facts: Facts = NO_FACTS) -> Self:
        """Create a member that is a string with its facts as attributes."""
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
        """Whether it ended permanently, so that it cannot be resumed."""
        return self.ended and not self.resumable

    @property
    def failed(self) -> bool:
        """Whether it ended without a result."""
        return self.ended and self.tone != "good"


class SearchState(State):
    """State of a search. Succeeded and cancelled are final; failed may be resumed or cancelled."""

    QUEUED = "queued"
    """Waits for a coordinator."""
    RUNNING = "running", Facts(tone="busy")
    """Has a coordinator, or one with an expired lease, so that another may claim it."""
    PAUSED = "paused", Facts(tone="warn", resumable=True)
    """Waits until it is resumed or claimed by its id."""
    SUCCEEDED = "succeeded", Facts(tone="good", ended=True)
    FAILED = "failed", Facts(tone="bad", ended=True, resumable=True)
    CANCELLED = "cancelled", Facts(ended=True, happened="was cancelled")


class RunState(State):
    """State of a profile run."""

    INTENDED = "intended", Facts(happened="has not started")
    """Stored before the submit; after a crash its job is found by name."""
    SUBMITTED = "submitted", Facts(tone="busy", label="running", happened="has not ended")
    """Accepted by the engine, with a `handle`."""
    FINISHED = "finished", Facts(ended=True)
    """Has a measurement and is never run again."""
    ABANDONED = "abandoned", Facts(ended=True, happened="was abandoned")
    """Ended without information about the configuration (preempted, lost, cancelled); may be
    repeated.
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
    """Phase of a running job, read from its log.

    `happened` is a template with the placeholders `warmup` and `steps` (steps done) and `of_steps`
    (maximum).
    """

    QUEUED = "queued", Facts(label="waiting", happened="waiting for devices")
    START_UP = "start-up", Facts(label="starting", happened="starting up")
    WARM_UP = "warm-up", Facts(label="warming up", happened="warming up, {warmup} done")
    STEPS = "steps", Facts(label="measuring", happened="measuring, step {steps} of {of_steps}")
    RUNNING = "running"
    """A job that logs no steps."""


class JobState(State):
    """State of a job, independent of the engine's terms."""

    QUEUED = "queued"
    """Accepted, waits for devices."""
    RUNNING = "running"
    """Uses devices."""
    FINISHED = "finished", Facts(ended=True)
    """Ended by itself or by its time limit; fetch() reports how."""
    PREEMPTED = "preempted", Facts(ended=True)
    """Ended by the engine, not because of the configuration."""
    CANCELLED = "cancelled", Facts(ended=True)
    """Ended on request."""
    LOST = "lost", Facts(ended=True)
    """Unknown to the engine, without a result."""
