"""Slurm's words for a job's state, and ours. squeue and sacct use the same ones."""

from __future__ import annotations

from hp_tool.domain.ports import JobState

_STATES: dict[JobState, tuple[str, ...]] = {
    JobState.QUEUED: ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    # Until COMPLETING is over the node may still have processes of the job.
    JobState.RUNNING: ("CONFIGURING", "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"),
    JobState.FINISHED: ("COMPLETED", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"),
    JobState.PREEMPTED: ("BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "NODE_FAIL", "PREEMPTED", "RECONFIG_FAIL", "REVOKED"),
    JobState.CANCELLED: ("CANCELLED",),
}
_BY_WORD = {word: state for state, words in _STATES.items() for word in words}

NEVER_STARTS = frozenset(
    {
        "AccountNotAllowed",
        "AssocMaxWallDurationPerJobLimit",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "JobHoldMaxRequeue",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSMaxWallDurationPerJobLimit",
        "QOSNotAllowed",
    }
)
"""Reasons of a pending job that waiting does not mend."""


def job_state(word: str, *, cancelled_by_us: bool) -> JobState:
    """The state for Slurm's word, such as `RUNNING` or sacct's `CANCELLED by 1000`.

    A job that somebody else cancelled was taken from us. A word from a newer Slurm than this table counts as running:
    the job's end is then told by a word that is known, or by the job leaving the queue.
    """
    state = _BY_WORD.get(word.split(" ", 1)[0].rstrip("+"), JobState.RUNNING)
    return JobState.PREEMPTED if state is JobState.CANCELLED and not cancelled_by_us else state
