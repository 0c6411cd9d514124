"""Read a job's pods: why they are waiting, how long they ran and how they ended."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from hp_tool.cluster.launchers.jobs import Ending

Object = Mapping[str, Any]
_NEVER_STARTS = (
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)
"""Waiting reasons of a container that can never start."""


def pod_ending(pod: Object) -> Ending | None:
    """Return how a pod ended if it failed before the job could record this; otherwise None."""
    status = pod.get("status") or {}
    if status.get("reason") == "DeadlineExceeded":
        return Ending(reason="timeout")
    disruptions = [
        condition
        for condition in status.get("conditions") or []
        if condition.get("type") == "DisruptionTarget"
    ]
    if status.get("reason") in ("Evicted", "NodeLost", "Shutdown", "Terminated") or disruptions:
        reason = status.get("reason") or disruptions[0].get("reason", "")
        return Ending(reason="terminated", error=f"Kubernetes ended the job: {reason}")
    for container in status.get("containerStatuses") or []:
        waiting, terminated = (
            container.get("state", {}).get(state) or {} for state in ("waiting", "terminated")
        )
        if waiting.get("reason") in _NEVER_STARTS:
            return Ending(
                reason="failed_to_start",
                error=f"{waiting['reason']}: {waiting.get('message', '')}"[:500],
            )
        if terminated.get("reason") == "OOMKilled":
            return Ending(reason="exited", exit_code=137, oom_kills=1)
        if code := terminated.get("exitCode"):
            message = " ".join(filter(None, (terminated.get("reason"), terminated.get("message"))))[
                :500
            ]
            error = f"the container exited with {code} before the job started: {message}"
            return Ending(reason="failed_to_start", error=error)
    return None


def ran_for_s(pods: Sequence[Object], *, until: datetime | None) -> float | None:
    """Return the seconds from the first container's start to the last one's end, or to `until`.

    Return None if no pod reports times.
    """
    statuses = [
        container.get("state") or {}
        for pod in pods
        for container in (pod.get("status") or {}).get("containerStatuses") or []
    ]
    spans = [state.get("terminated") or state.get("running") or {} for state in statuses]
    starts = [datetime.fromisoformat(span["startedAt"]) for span in spans if span.get("startedAt")]
    ends = [datetime.fromisoformat(span["finishedAt"]) for span in spans if span.get("finishedAt")]
    if len(ends) < len(starts) and until is not None:
        ends.append(until)
    return max((max(ends) - min(starts)).total_seconds(), 0.0) if starts and ends else None


def never_starts(pod: Object) -> bool:
    """Return True if a pod can never start.

    The first failed image pull does not count, because Kubernetes retries it.
    """
    return any(
        reason in _NEVER_STARTS and reason != "ErrImagePull"
        for reason, _ in _waiting_containers(pod)
    )


def why_waiting(pod: Object) -> str | None:
    """Return Kubernetes' reason why a pod is not ready; None if it gives none."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))[
                :300
            ]
    return next((": ".join(filter(None, wait))[:300] for wait in _waiting_containers(pod)), None)


def _waiting_containers(pod: Object) -> list[tuple[str, str]]:
    states = [
        container.get("state") or {}
        for container in (pod.get("status") or {}).get("containerStatuses") or []
    ]
    waiting = [state.get("waiting") or {} for state in states]
    return [(wait["reason"], wait.get("message", "")) for wait in waiting if wait.get("reason")]
