"""Jobs on a Kubernetes cluster through kubectl, without a shared folder or local state.

Each job is an indexed Job with one pod per node, optionally in a JobSet. Pods find the first pod
through a headless Service, and a ConfigMap holds the job's files. The supervisor in each pod prints
its results, which are read from the pod's log. When a job is cancelled, it is deleted, and a
ConfigMap reserves its name and stores its log.
"""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hp_tool.cluster.launchers import jobs, torchrun
from hp_tool.cluster.launchers.jobs import Ending
from hp_tool.cluster.launchers.kubernetes_manifest import (
    CANCELLED,
    LABEL,
    NUM_GPUS,
    TIMEOUT_S,
    manifest,
    object_name,
    owned_objects,
    tombstone_name,
    tombstone_object,
    workload_object,
)
from hp_tool.cluster.launchers.kubernetes_pods import (
    Object,
    never_starts,
    pod_ending,
    ran_for_s,
    why_waiting,
)
from hp_tool.cluster.launchers.options import KubernetesOptions
from hp_tool.cluster.launchers.streamed import StreamedLauncher
from hp_tool.domain.jobs import LaunchPlan, Waiting
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.states import JobState
from hp_tool.errors import EngineAwayError, LauncherError

_TEMPORARY_ERROR = re.compile(
    r"Unable to connect|connection|TooManyRequests|ServiceUnavailable|etcdserver: |try again"
)
"""Error messages of an API server that is unreachable, restarting or overloaded."""
_NODE_ERROR = re.compile(r"containerLogs|no answer within")
"""Error messages when a pod's log cannot be read because of its node, not the API server."""
_COMMAND_LIMIT_S = 20.0
"""Time limit of a kubectl command in seconds. It is shorter than a lease."""
WALL_S = "hp-tool/wall-s"
"""Annotation that stores how many seconds a cancelled job ran."""
_LOG = "log"
_MAX_LOG_CHARACTERS = 200_000
"""Maximum number of characters of a log that a ConfigMap stores. The end of the log is kept."""
_MIN_KEEP_S = 86_400.0
"""Minimum number of seconds for which a cancelled job's name stays reserved: one day."""


class KubernetesLauncher(StreamedLauncher):
    """Launch jobs on a Kubernetes cluster. A handle is the name of the Job object."""

    name = "kubernetes"

    def __init__(self, *, options: KubernetesOptions | Mapping[str, object] | None = None) -> None:
        """Connect to the cluster in `options`.

        By default, load the options file that HP_KUBERNETES_CONFIG names.
        """
        self._options = KubernetesOptions.create(options)
        self._kind = self._options.workload
        self._queued: dict[str, list[Object]] = {}
        """Pods of waiting jobs, as last listed, by job handle."""
        super().__init__(self._options)

    def answers(self) -> str:
        namespace = self._options.namespace
        kinds = "jobs.batch" if self._kind == "job" else "jobsets.jobset.x-k8s.io"
        for verb, kind in (
            *(("create", name) for name in (kinds, "configmaps", "services")),
            ("delete", kinds),
        ):
            if self._kubectl("auth", "can-i", verb, kind, negative="no").strip() != "yes":
                raise LauncherError(
                    f"This user may not {verb} {kind} in namespace {namespace}. Grant the right."
                )
        workload = workload_object(
            self._options, plan=torchrun.smallest_plan(self._options, job_name="hp-doctor")
        )
        self._kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(workload))
        return f"Kubernetes responds: {workload['kind']}s can be created in namespace {namespace}"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        plan = torchrun.cluster_plan(request, job_name=job_name, options=self._options)
        if "PYTHONPATH" in self._options.environment:
            return plan
        # The image contains its own hp_tool; this host's checkout does not exist there.
        return replace(
            plan,
            environment={
                name: value for name, value in plan.environment.items() if name != "PYTHONPATH"
            },
        )

    def describe(self, plan: LaunchPlan) -> str:
        return json.dumps(manifest(self._options, plan=plan), indent=2)

    def submit(self, plan: LaunchPlan) -> str:
        """Create the Job, then the ConfigMap and Service that it owns and its pods wait for."""
        handle = object_name(plan.job_name)
        # Reject large files before any object is created.
        owned_objects(self._options, plan=plan)
        if self._ended(handle) is not None:
            return handle
        job = self._running(handle) or self._create(workload_object(self._options, plan=plan))
        if job_state(job).is_open:
            for resource in owned_objects(self._options, plan=plan, job_uid=job["metadata"]["uid"]):
                self._kubectl("apply", "-f", "-", stdin=json.dumps(resource))
        if self._ended(handle) is not None:  # cancelled before the Job existed
            self._delete(handle)
        return handle

    def cancel(self, job_name: str) -> None:
        """Reserve the job's name, save its log, and delete the Job and its pods."""
        handle = object_name(job_name)
        tombstone = tombstone_object(self._options, handle=handle)
        if self._ended(handle) is None:
            self._create(tombstone)
        job = self._running(handle)
        if job is None or not job_state(job).is_open:
            return
        pods = self._pods(handle)
        ran_s = ran_for_s(pods, until=datetime.now(UTC))
        annotations = {
            name: text for name, text in _annotations(job).items() if name in (NUM_GPUS, TIMEOUT_S)
        }
        annotations[WALL_S] = f"{_running_s(job) if ran_s is None else ran_s:g}"
        log = "\n".join(self._texts(handle))[-_MAX_LOG_CHARACTERS:]
        saved = {"metadata": {"annotations": annotations}, "data": {_LOG: log}}
        self._kubectl(
            "patch",
            "configmap",
            tombstone["metadata"]["name"],
            "--type=merge",
            "--patch",
            json.dumps(saved),
        )
        self._delete(handle)
        self._delete_old()

    def _delete(self, handle: str) -> None:
        """Delete the Job in the foreground: Kubernetes deletes its pods first.

        Do not wait for the deletion.
        """
        self._kubectl(
            "delete",
            self._kind,
            handle,
            "--cascade=foreground",
            "--wait=false",
            "--ignore-not-found",
        )

    def _delete_old(self) -> None:
        with contextlib.suppress(LauncherError):
            for resource in self._items("configmaps", CANCELLED):
                created_at = resource["metadata"].get("creationTimestamp")
                age_s = (
                    (datetime.now(UTC) - datetime.fromisoformat(created_at)).total_seconds()
                    if created_at
                    else 0.0
                )
                if age_s > max(self._options.keep_s, _MIN_KEEP_S):
                    self._kubectl(
                        "delete", "configmap", resource["metadata"]["name"], "--ignore-not-found"
                    )

    def open_jobs(self) -> list[str]:
        """Return the names of the search jobs that have not ended."""
        return [name for name, job in self._list_jobs().items() if job_state(job).is_open]

    def _handle(self, job_name: str) -> str:
        return object_name(job_name)

    def waiting(self, handle: str) -> Waiting | None:
        reasons = [
            reason
            for pod in self._queued.get(handle, ())
            if (reason := why_waiting(pod)) is not None
        ]
        if not reasons and ((self._jobs.get(handle) or {}).get("spec") or {}).get("suspend"):
            reasons = ["suspended: not admitted by its queue"]
        return Waiting(reason=reasons[0]) if reasons else None

    def lasted_s(self, handle: str) -> float | None:
        job = self._running(handle) or {"metadata": {}}
        created_at, ended_at = job["metadata"].get("creationTimestamp"), _ended_at(job)
        return (
            max((ended_at - datetime.fromisoformat(created_at)).total_seconds(), 0.0)
            if created_at and ended_at
            else None
        )

    def _list_jobs(self) -> dict[str, Object]:
        """Return the jobs by handle.

        For waiting jobs, also list the pods, which state why they wait.
        """
        jobs_by_name = {
            job["metadata"]["name"]: job for job in self._items(f"{self._kind}s", LABEL)
        }
        self._queued = {}
        if any(map(_lacks_pods, jobs_by_name.values())):
            with contextlib.suppress(LauncherError):
                for pod in self._items("pods", LABEL):
                    self._queued.setdefault(
                        pod["metadata"].get("labels", {}).get(LABEL, ""), []
                    ).append(pod)
        return jobs_by_name

    def _job(self, handle: str) -> dict[str, Any] | None:
        return self._running(handle) or self._ended(handle)

    def _running(self, handle: str) -> dict[str, Any] | None:
        return self._get(self._kind, handle)

    def _ended(self, handle: str) -> dict[str, Any] | None:
        return self._get("configmap", tombstone_name(handle))

    def _get(self, kind: str, name: str) -> dict[str, Any] | None:
        answer = self._kubectl("get", kind, name, "--ignore-not-found", "-o", "json")
        resource: dict[str, Any] | None = json.loads(answer) if answer.strip() else None
        return resource

    def _state(self, job: Object) -> JobState:
        state = job_state(job)
        if state.is_open and any(map(never_starts, self._queued.get(job["metadata"]["name"], ()))):
            return JobState.FINISHED
        return state

    def _ending(self, handle: str, job: Object) -> Ending:
        return ending(job, pods=() if job["kind"] == "ConfigMap" else self._pods(handle))

    def _request(self, job: Object) -> tuple[int, float]:
        annotations = _annotations(job)
        return int(annotations.get(NUM_GPUS, 1)), float(annotations.get(TIMEOUT_S, 0.0))

    def _pods(self, handle: str) -> list[Object]:
        return sorted(self._items("pods", f"{LABEL}={handle}"), key=_index)

    def _texts(self, handle: str) -> Iterable[str]:
        """Yield the log of each pod, or the saved log of a cancelled job.

        Logs of lost nodes are skipped.
        """
        pods = self._pods(handle)
        if not pods and (cancelled := self._ended(handle)) is not None:
            yield cancelled.get("data", {}).get(_LOG, "")
        limit = f"--limit-bytes={jobs.MAX_OUTPUT_BYTES}"
        for pod in pods:
            try:
                yield self._kubectl("logs", pod["metadata"]["name"], "--container=run", limit)
            except LauncherError as error:
                if isinstance(error, EngineAwayError) and not _NODE_ERROR.search(error.message):
                    raise  # The log may contain the result.

    def _create(self, job: dict[str, Any]) -> dict[str, Any]:
        """Create an object.

        Return the existing one if an earlier call or another process created it.
        """
        try:
            created: dict[str, Any] = json.loads(
                self._kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(job))
            )
        except LauncherError:
            existing = self._get(job["kind"].lower(), job["metadata"]["name"])
            if existing is None:
                raise
            return existing
        return created

    def _items(self, kind: str, selector: str) -> list[Object]:
        items: list[Object] = json.loads(
            self._kubectl("get", kind, f"--selector={selector}", "-o", "json")
        )["items"]
        return items

    def _kubectl(self, *arguments: str, stdin: str = "", negative: str | None = None) -> str:
        """Run kubectl and return its output.

        Args:
            *arguments: Arguments of kubectl.
            stdin: Standard input.
            negative: Output that is a valid answer although the exit code is not zero.
        """
        options = self._options
        context = [] if options.context is None else [f"--context={options.context}"]
        command = [options.kubectl, *context, f"--namespace={options.namespace}", *arguments]
        try:
            done = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=_COMMAND_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            self._set_away(True)
            raise EngineAwayError(
                f"kubectl {arguments[0]}: no response within {_COMMAND_LIMIT_S:g} s"
            ) from error
        except OSError as error:
            self._set_away(True)
            raise LauncherError(f"Cannot run {options.kubectl}: {error}") from error
        if done.returncode != 0 and (negative is None or done.stdout.strip() != negative):
            message = " ".join(done.stderr.split())[:500]
            if _TEMPORARY_ERROR.search(message):
                self._set_away(True)
                raise EngineAwayError(f"kubectl {arguments[0]}: {message}")
            raise LauncherError(
                f"kubectl {arguments[0]}: {message or f'exit status {done.returncode}'}"
            )
        self._set_away(False)
        return done.stdout


def job_state(job: Object) -> JobState:
    """Return the state of a Job or JobSet; CANCELLED for a ConfigMap."""
    status = job.get("status") or {}
    if job.get("kind") == "ConfigMap":
        return JobState.CANCELLED
    if _conditions(job).keys() & {"Complete", "Completed", "Failed"}:
        return JobState.FINISHED
    return (
        JobState.RUNNING
        if _ready(status) or job["metadata"].get("deletionTimestamp")
        else JobState.QUEUED
    )


def _ready(status: Object) -> int:
    return int(
        status.get("ready")
        or sum(part.get("ready") or 0 for part in status.get("replicatedJobsStatus") or [])
    )


def _lacks_pods(job: Object) -> bool:
    """Return True if an open job has fewer ready pods than nodes."""
    parallelism = int(job.get("spec", {}).get("parallelism") or 1)
    return job_state(job).is_open and _ready(job.get("status") or {}) < parallelism


def ending(job: Object, *, pods: Sequence[Object]) -> Ending:
    """Return how a job without its own record ended: evicted, timeout, OOM or never started."""
    status, failed = job.get("status") or {}, _conditions(job).get("Failed", {})
    if job.get("kind") == "ConfigMap":
        return Ending(reason="cancelled", wall_s=float(_annotations(job).get(WALL_S, 0.0)))
    start, end = status.get("startTime"), _ended_at(job)
    wall_s = (end - datetime.fromisoformat(start)).total_seconds() if start and end else None
    ran_s = ran_for_s(pods, until=end)
    # The Job's own start and end times include the wait for nodes and images.
    wall_s = wall_s if ran_s is None else ran_s
    if failed.get("reason") == "DeadlineExceeded":
        return Ending(reason="timeout", wall_s=wall_s)
    endings = [found for pod in pods if (found := pod_ending(pod)) is not None]
    if endings:
        return replace(endings[0], wall_s=wall_s)
    if not failed:
        return Ending(
            reason="lost", wall_s=wall_s, error="the job's pods and their output are gone"
        )
    message = ": ".join(filter(None, (failed.get("reason"), failed.get("message"))))[:500]
    return Ending(reason="terminated", wall_s=wall_s, error=f"Kubernetes ended the job: {message}")


def _ended_at(job: Object) -> datetime | None:
    status = job.get("status") or {}
    text = status.get("completionTime") or _conditions(job).get("Failed", {}).get(
        "lastTransitionTime"
    )
    return datetime.fromisoformat(text) if text else None


def _running_s(job: Object) -> float:
    start = (job.get("status") or {}).get("startTime")
    if start is None or job_state(job) is not JobState.RUNNING:
        return 0.0
    return max((datetime.now(UTC) - datetime.fromisoformat(start)).total_seconds(), 0.0)


def _index(pod: Object) -> int:
    index = str(_annotations(pod).get("batch.kubernetes.io/job-completion-index", "0"))
    return int(index) if index.isdecimal() else 0


def _annotations(resource: Object) -> Object:
    return resource["metadata"].get("annotations") or {}


def _conditions(job: Object) -> dict[str, Any]:
    conditions = (job.get("status") or {}).get("conditions") or []
    return {
        condition["type"]: condition
        for condition in conditions
        if condition.get("status") == "True"
    }
