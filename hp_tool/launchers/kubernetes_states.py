"""What Kubernetes says of a job and its pods, in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hp_tool.domain.ports import JobState
from hp_tool.launchers.outcome import Ending

CANCELLED = "hp-tool/cancelled"
"""Annotation of a job that we ended."""
WALL_S = "hp-tool/wall-s"
"""How long such a job had run: Kubernetes forgets when a suspended one began."""
Object = Mapping[str, Any]
_NEVER_STARTS = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")


def job_state(job: Object) -> JobState:
    """The state that a Job object tells: by its conditions, else by the pods that run."""
    status = job.get("status") or {}
    if (job["metadata"].get("annotations") or {}).get(CANCELLED):
        return JobState.RUNNING if status.get("active") else JobState.CANCELLED
    if _conditions(job).keys() & {"Complete", "Failed"}:
        return JobState.FINISHED
    return JobState.RUNNING if status.get("ready") else JobState.QUEUED


def ended(job: Object) -> bool:
    return job_state(job) not in (JobState.QUEUED, JobState.RUNNING)


def ending(job: Object, *, pods: Sequence[Object]) -> Ending:
    """How a job ended that could not say it itself: evicted, out of time or of memory, or never begun."""
    status, failed = job.get("status") or {}, _conditions(job).get("Failed", {})
    wall_s = _between(status.get("startTime"), status.get("completionTime") or failed.get("lastTransitionTime"))
    annotations = job["metadata"].get("annotations") or {}
    if annotations.get(CANCELLED):
        return Ending(reason="cancelled", wall_s=float(annotations.get(WALL_S, 0.0)))
    if (failed.get("reason") or "") == "DeadlineExceeded":
        return Ending(reason="timeout", wall_s=wall_s)
    for pod in pods:
        told = _of_pod(pod, wall_s=wall_s)
        if told is not None:
            return told
    if not failed:
        return Ending(reason="lost", wall_s=wall_s, error="the job's pods are gone, and so is what they printed")
    said = ": ".join(filter(None, (failed.get("reason"), failed.get("message"))))[:500]
    return Ending(reason="terminated", wall_s=wall_s, error=f"Kubernetes ended the job: {said}")


def never_starts(pod: Object) -> str | None:
    """Why a pod's container cannot be made, where waiting does not mend it."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _NEVER_STARTS:
            return f"{waiting['reason']}: {waiting.get('message', '')}"[:500]
    return None


def running_s(job: Object) -> float:
    """Seconds that the job has been running by now; 0 while it waits."""
    began = (job.get("status") or {}).get("startTime")
    if began is None or job_state(job) is not JobState.RUNNING:
        return 0.0
    return max((datetime.now(UTC) - datetime.fromisoformat(began)).total_seconds(), 0.0)


def index(pod: Object) -> int:
    """Which node of the job a pod is."""
    told = (pod["metadata"].get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", "0")
    return int(told) if str(told).isdecimal() else 0


def _of_pod(pod: Object, *, wall_s: float | None) -> Ending | None:
    status = pod.get("status") or {}
    if status.get("reason") == "DeadlineExceeded":
        return Ending(reason="timeout", wall_s=wall_s)
    disrupted = [each for each in status.get("conditions") or [] if each.get("type") == "DisruptionTarget"]
    if status.get("reason") in ("Evicted", "NodeLost", "Shutdown", "Terminated") or disrupted:
        word = status.get("reason") or disrupted[0].get("reason", "")
        return Ending(reason="terminated", wall_s=wall_s, error=f"Kubernetes ended the job: {word}")
    if (why := never_starts(pod)) is not None:
        return Ending(reason="failed_to_start", wall_s=wall_s, error=why)
    for container in status.get("containerStatuses") or []:
        end = container.get("state", {}).get("terminated") or {}
        if end.get("reason") == "OOMKilled":
            return Ending(reason="exited", exit_code=137, oom_kills=1, wall_s=wall_s)
        if end.get("exitCode"):
            said = " ".join(filter(None, (end.get("reason"), end.get("message"))))[:500]
            error = f"the container ended with {end['exitCode']} before the job began: {said}"
            return Ending(reason="failed_to_start", wall_s=wall_s, error=error)
    return None


def _conditions(job: Object) -> dict[str, Any]:
    listed = (job.get("status") or {}).get("conditions") or []
    return {each["type"]: each for each in listed if each.get("status") == "True"}


def _between(start: str | None, end: str | None) -> float | None:
    if not start or not end:
        return None
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
