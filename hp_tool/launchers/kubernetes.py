"""Jobs on a Kubernetes cluster through kubectl: no shared folder, no state of our own.

The supervisor runs a job's part in each pod and prints its results, which are read from the pods' logs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hp_tool.domain.ports import JobState, LaunchPlan
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import LauncherError
from hp_tool.launchers import jobs, kubernetes_manifest, torchrun
from hp_tool.launchers.kubernetes_manifest import CANCELLED, LABEL, NUM_GPUS, TIMEOUT_S, WALL_S, object_name
from hp_tool.launchers.options import KubernetesOptions
from hp_tool.launchers.outcome import Ending
from hp_tool.launchers.streamed import StreamedLauncher

_COMMAND_LIMIT_S = 20.0
"""Shorter than a coordinator's lease."""
_NEVER_STARTS = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
"""Reasons of a waiting container that will never start."""
Object = Mapping[str, Any]


class KubernetesLauncher(StreamedLauncher):
    """The Launcher port on a Kubernetes cluster. A handle is the name of the Job object."""

    name = "kubernetes"

    def __init__(self, *, options: KubernetesOptions | Mapping[str, object] | None = None) -> None:
        """options: the cluster (default: the file that HP_KUBERNETES_CONFIG names)."""
        self._options = KubernetesOptions.of(options)
        super().__init__(self._options)

    def answers(self) -> str:
        namespace = self._options.namespace
        for kind in ("jobs.batch", "configmaps", "services"):
            if self._kubectl("auth", "can-i", "create", kind, negative="no").strip() != "yes":
                raise LauncherError(f"this user may not create {kind} in the namespace {namespace}")
        return f"Kubernetes answers: Jobs may be created in the namespace {namespace}"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """Pure. Raises InputError if the request is for another device, or for more devices than one job may have."""
        plan = torchrun.cluster_plan(request, job_name=job_name, options=self._options)
        if "PYTHONPATH" in self._options.environment:
            return plan
        # This host's checkout does not exist in the image, which has its own hp_tool.
        return replace(plan, environment={name: value for name, value in plan.environment.items() if name != "PYTHONPATH"})

    def describe(self, plan: LaunchPlan) -> str:
        return json.dumps(kubernetes_manifest.manifest(self._options, plan=plan), indent=2)

    def submit(self, plan: LaunchPlan) -> str:
        """The Job comes first: what belongs to it carries its uid, and its pods wait for that."""
        handle = object_name(plan.job_name)
        kubernetes_manifest.belongings(self._options, plan=plan)  # refuses files that are too large before anything is created
        job = self._job(handle) or self._create(kubernetes_manifest.job(self._options, plan=plan))
        if job_state(job).is_open:
            for each in kubernetes_manifest.belongings(self._options, plan=plan, job_uid=job["metadata"]["uid"]):
                self._kubectl("apply", "-f", "-", stdin=json.dumps(each))
        return handle

    def cancel(self, job_name: str) -> None:
        """Suspend the Job, which ends its pods and keeps their log as far as it was read. Without a Job, create one that takes
        the name."""
        handle = object_name(job_name)
        job = self._job(handle) or self._create(kubernetes_manifest.cancelled_job(self._options, job_name=job_name))
        if job_state(job).is_open:
            annotations = {CANCELLED: "true", WALL_S: f"{_running_s(job):g}"}
            patch = {"metadata": {"annotations": annotations}, "spec": {"suspend": True}}
            self._kubectl("patch", "job", handle, "--type=merge", "--patch", json.dumps(patch))

    def open_jobs(self) -> list[str]:
        """Names of Job objects; those of searches are their job names."""
        return [name for name, job in self._list_jobs().items() if job_state(job).is_open]

    def _handle(self, job_name: str) -> str:
        return object_name(job_name)

    def _list_jobs(self) -> dict[str, Object]:
        return {job["metadata"]["name"]: job for job in self._items("jobs", LABEL)}

    def _job(self, handle: str) -> dict[str, Any] | None:
        answer = self._kubectl("get", "job", handle, "--ignore-not-found", "-o", "json")
        job: dict[str, Any] | None = json.loads(answer) if answer.strip() else None
        return job

    def _state(self, job: Object) -> JobState:
        return job_state(job)

    def _ending(self, handle: str, job: Object) -> Ending:
        return ending(job, pods=self._pods(handle))

    def _request(self, job: Object) -> tuple[int, float]:
        annotations = _annotations(job)
        return int(annotations.get(NUM_GPUS, 1)), float(annotations.get(TIMEOUT_S, 0.0))

    def _pods(self, handle: str) -> list[Object]:
        """The job's pods in the order of their index."""
        return sorted(self._items("pods", f"{LABEL}={handle}"), key=_index)

    def _texts(self, handle: str) -> Iterable[str]:
        """Nothing for a pod whose node is gone."""
        for pod in self._pods(handle):
            with contextlib.suppress(LauncherError):
                limit = f"--limit-bytes={jobs.MAX_OUTPUT_BYTES}"
                yield self._kubectl("logs", pod["metadata"]["name"], "--container=run", limit)

    def _create(self, job: dict[str, Any]) -> dict[str, Any]:
        """The new Job, or the existing one if another process created it first or an earlier answer was lost."""
        try:
            created: dict[str, Any] = json.loads(self._kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(job)))
        except LauncherError:
            existing = self._job(job["metadata"]["name"])
            if existing is None:
                raise
            return existing
        return created

    def _items(self, kind: str, selector: str) -> list[Object]:
        """All objects of a kind in the namespace that a label selects."""
        items: list[Object] = json.loads(self._kubectl("get", kind, f"--selector={selector}", "-o", "json"))["items"]
        return items

    def _kubectl(self, *arguments: str, stdin: str = "", negative: str | None = None) -> str:
        """The output of kubectl. `negative`: an answer for which it exits with a failure although it succeeded."""
        options = self._options
        context = [] if options.context is None else [f"--context={options.context}"]
        command = [options.kubectl, *context, f"--namespace={options.namespace}", *arguments]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._set_away(True)
            raise LauncherError(f"{options.kubectl} cannot be run: {error}") from error
        if done.returncode != 0 and (negative is None or done.stdout.strip() != negative):
            message = " ".join(done.stderr.split())[:500]
            if "Unable to connect" in message or "connection" in message:
                self._set_away(True)
            raise LauncherError(f"kubectl {arguments[0]}: {message or done.returncode}")
        self._set_away(False)
        return done.stdout


def job_state(job: Object) -> JobState:
    """The state of a Job object: by its conditions, else by its running pods."""
    status = job.get("status") or {}
    if _annotations(job).get(CANCELLED):
        return JobState.RUNNING if status.get("active") else JobState.CANCELLED
    if _conditions(job).keys() & {"Complete", "Failed"}:
        return JobState.FINISHED
    return JobState.RUNNING if status.get("ready") else JobState.QUEUED


def ending(job: Object, *, pods: Sequence[Object]) -> Ending:
    """How a job ended that left no record itself: evicted, out of time or memory, or never started."""
    status, failed, annotations = job.get("status") or {}, _conditions(job).get("Failed", {}), _annotations(job)
    if annotations.get(CANCELLED):
        return Ending(reason="cancelled", wall_s=float(annotations.get(WALL_S, 0.0)))
    start, end = status.get("startTime"), status.get("completionTime") or failed.get("lastTransitionTime")
    wall_s = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds() if start and end else None
    if failed.get("reason") == "DeadlineExceeded":
        return Ending(reason="timeout", wall_s=wall_s)
    endings = [each for pod in pods if (each := _pod_ending(pod)) is not None]
    if endings:
        return replace(endings[0], wall_s=wall_s)
    if not failed:
        return Ending(reason="lost", wall_s=wall_s, error="the job's pods are gone, and so is their output")
    message = ": ".join(filter(None, (failed.get("reason"), failed.get("message"))))[:500]
    return Ending(reason="terminated", wall_s=wall_s, error=f"Kubernetes ended the job: {message}")


def _pod_ending(pod: Object) -> Ending | None:
    status = pod.get("status") or {}
    if status.get("reason") == "DeadlineExceeded":
        return Ending(reason="timeout")
    disruptions = [each for each in status.get("conditions") or [] if each.get("type") == "DisruptionTarget"]
    if status.get("reason") in ("Evicted", "NodeLost", "Shutdown", "Terminated") or disruptions:
        reason = status.get("reason") or disruptions[0].get("reason", "")
        return Ending(reason="terminated", error=f"Kubernetes ended the job: {reason}")
    for container in status.get("containerStatuses") or []:
        waiting, terminated = (container.get("state", {}).get(state) or {} for state in ("waiting", "terminated"))
        if waiting.get("reason") in _NEVER_STARTS:
            return Ending(reason="failed_to_start", error=f"{waiting['reason']}: {waiting.get('message', '')}"[:500])
        if terminated.get("reason") == "OOMKilled":
            return Ending(reason="exited", exit_code=137, oom_kills=1)
        if code := terminated.get("exitCode"):
            message = " ".join(filter(None, (terminated.get("reason"), terminated.get("message"))))[:500]
            error = f"the container exited with {code} before the job started: {message}"
            return Ending(reason="failed_to_start", error=error)
    return None


def _running_s(job: Object) -> float:
    """Seconds that the job has been running by now; 0 while it waits."""
    start = (job.get("status") or {}).get("startTime")
    if start is None or job_state(job) is not JobState.RUNNING:
        return 0.0
    return max((datetime.now(UTC) - datetime.fromisoformat(start)).total_seconds(), 0.0)


def _index(pod: Object) -> int:
    """Which node of the job a pod is."""
    index = str(_annotations(pod).get("batch.kubernetes.io/job-completion-index", "0"))
    return int(index) if index.isdecimal() else 0


def _annotations(resource: Object) -> Object:
    return resource["metadata"].get("annotations") or {}


def _conditions(job: Object) -> dict[str, Any]:
    conditions = (job.get("status") or {}).get("conditions") or []
    return {each["type"]: each for each in conditions if each.get("status") == "True"}
