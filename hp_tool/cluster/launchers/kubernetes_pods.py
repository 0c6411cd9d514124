"""What Kubernetes says of a job's pods: why they wait, how long they ran, how they ended."""

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
"""Reasons of a waiting container that will never start."""


def pod_ending(pod: Object) -> Ending | None:
    status = pod.get("status") or {}
    if status.get("reason") == "DeadlineExceeded":
        return Ending(reason="timeout")
    disruptions = [
        each for each in status.get("conditions") or [] if each.get("type") == "DisruptionTarget"
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
    """Seconds from the start of the first container to the end of the last, or to `until`; None
    where no pod tells.
    """
    statuses = [
        each.get("state") or {}
        for pod in pods
        for each in (pod.get("status") or {}).get("containerStatuses") or []
    ]
    spans = [state.get("terminated") or state.get("running") or {} for state in statuses]
    starts = [datetime.fromisoformat(span["startedAt"]) for span in spans if span.get("startedAt")]
    ends = [datetime.fromisoformat(span["finishedAt"]) for span in spans if span.get("finishedAt")]
    if len(ends) < len(starts) and until is not None:
        ends.append(until)
    return max((max(ends) - min(starts)).total_seconds(), 0.0) if starts and ends else None


def never_starts(pod: Object) -> bool:
    """Whether a pod's image or container will not do; a first pull that failed is tried again."""
    return any(reason in _NEVER_STARTS and reason != "ErrImagePull" for reason, _ in _waits(pod))


def why_waiting(pod: Object) -> str | None:
    """What Kubernetes says of a pod that is not ready."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))[
                :300
            ]
    return next((": ".join(filter(None, each))[:300] for each in _waits(pod)), None)


def _waits(pod: Object) -> list[tuple[str, str]]:
    """(reason, message) of each container that waits."""
    states = [
        each.get("state") or {} for each in (pod.get("status") or {}).get("containerStatuses") or []
    ]
    waiting = [state.get("waiting") or {} for state in states]
    return [(each["reason"], each.get("message", "")) for each in waiting if each.get("reason")]
