"""Jobs on a Kubernetes cluster through kubectl: no shared folder, no state of our own.

A job is an indexed Job with a pod per node (alone, or as a JobSet's only one), which find the first
one by the name that a headless Service gives it; a ConfigMap holds the job's files. The supervisor
runs a job's part in each pod and prints its results, which are read from the pods' logs. What is
cancelled is deleted; a ConfigMap of its own then keeps the name taken, and the log.
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
    belongings,
    ended_name,
    ended_object,
    manifest,
    object_name,
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
from hp_tool.domain.jobs import JobState, LaunchPlan, Waiting
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import EngineAwayError, LauncherError

_PASSING = re.compile(
    r"Unable to connect|connection|TooManyRequests|ServiceUnavailable|etcdserver: |try again"
)
"""Answers of an API server that is away, restarts or has too much to do."""
_NODE_GONE = re.compile(r"containerLogs|no answer within")
"""What reading a log says of the pod's node rather than of the API server, which answered
before.
"""
_COMMAND_LIMIT_S = 20.0
"""Shorter than a coordinator's lease."""
WALL_S = "hp-tool/wall-s"
"""How long such a job had run."""
_LOG = "log"
_LARGEST_LOG_CHARACTERS = 200_000
"""A ConfigMap's log: the end of it."""
_LEAST_KEPT_S = 86_400.0
"""A name that was cancelled stays taken for a day at least."""


class KubernetesLauncher(StreamedLauncher):
    """The Launcher port on a Kubernetes cluster. A handle is the name of the Job object."""

    name = "kubernetes"

    def __init__(self, *, options: KubernetesOptions | Mapping[str, object] | None = None) -> None:
        """options: the cluster (default: the file that HP_KUBERNETES_CONFIG names)."""
        self._options = KubernetesOptions.of(options)
        self._kind = self._options.workload
        self._queued: dict[str, list[Object]] = {}
        """Pods of the jobs, when one of these was last seen to wait."""
        super().__init__(self._options)

    def answers(self) -> str:
        namespace = self._options.namespace
        kinds = "jobs.batch" if self._kind == "job" else "jobsets.jobset.x-k8s.io"
        for verb, kind in (
            *(("create", each) for each in (kinds, "configmaps", "services")),
            ("delete", kinds),
        ):
            if self._kubectl("auth", "can-i", verb, kind, negative="no").strip() != "yes":
                raise LauncherError(f"this user may not {verb} {kind} in the namespace {namespace}")
        workload = workload_object(
            self._options, plan=torchrun.smallest_plan(self._options, job_name="hp-doctor")
        )
        self._kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(workload))
        return (
            f"Kubernetes answers: {workload['kind']}s may be created in the namespace {namespace}"
        )

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        plan = torchrun.cluster_plan(request, job_name=job_name, options=self._options)
        if "PYTHONPATH" in self._options.environment:
            return plan
        # This host's checkout does not exist in the image, which has its own hp_tool.
        return replace(
            plan,
            environment={
                name: value for name, value in plan.environment.items() if name != "PYTHONPATH"
            },
        )

    def describe(self, plan: LaunchPlan) -> str:
        return json.dumps(manifest(self._options, plan=plan), indent=2)

    def submit(self, plan: LaunchPlan) -> str:
        """The Job comes first: what belongs to it carries its uid, and its pods wait for that."""
        handle = object_name(plan.job_name)
        belongings(
            self._options, plan=plan
        )  # refuses files that are too large before anything is created
        if self._ended(handle) is not None:
            return handle
        job = self._running(handle) or self._create(workload_object(self._options, plan=plan))
        if job_state(job).is_open:
            for each in belongings(self._options, plan=plan, job_uid=job["metadata"]["uid"]):
                self._kubectl("apply", "-f", "-", stdin=json.dumps(each))
        if (
            self._ended(handle) is not None
        ):  # perhaps by a process that looked before the Job was there
            self._delete(handle)
        return handle

    def cancel(self, job_name: str) -> None:
        """Take the name, keep the log as far as it was written, and delete the Job with its
        pods.
        """
        handle = object_name(job_name)
        tombstone = ended_object(self._options, handle=handle)
        if self._ended(handle) is None:
            self._create(tombstone)
        job = self._running(handle)
        if job is None or not job_state(job).is_open:
            return
        pods = self._pods(handle)
        ran_s = ran_for_s(pods, until=datetime.now(UTC))
        known = {
            name: text for name, text in _annotations(job).items() if name in (NUM_GPUS, TIMEOUT_S)
        }
        known[WALL_S] = f"{_running_s(job) if ran_s is None else ran_s:g}"
        log = "\n".join(self._texts(handle))[-_LARGEST_LOG_CHARACTERS:]
        kept = {"metadata": {"annotations": known}, "data": {_LOG: log}}
        self._kubectl(
            "patch",
            "configmap",
            tombstone["metadata"]["name"],
            "--type=merge",
            "--patch",
            json.dumps(kept),
        )
        self._delete(handle)
        self._forget_old()

    def _delete(self, handle: str) -> None:
        """The Job stays listed until its pods are gone."""
        self._kubectl(
            "delete",
            self._kind,
            handle,
            "--cascade=foreground",
            "--wait=false",
            "--ignore-not-found",
        )

    def _forget_old(self) -> None:
        """Delete what jobs that were cancelled long ago left."""
        with contextlib.suppress(LauncherError):
            for each in self._items("configmaps", CANCELLED):
                made = each["metadata"].get("creationTimestamp")
                age_s = (
                    (datetime.now(UTC) - datetime.fromisoformat(made)).total_seconds()
                    if made
                    else 0.0
                )
                if age_s > max(self._options.keep_s, _LEAST_KEPT_S):
                    self._kubectl(
                        "delete", "configmap", each["metadata"]["name"], "--ignore-not-found"
                    )

    def open_jobs(self) -> list[str]:
        """Names of Job objects; those of searches are their job names."""
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
            reasons = ["suspended: its queue has not admitted it"]
        return Waiting(reason=reasons[0]) if reasons else None

    def lasted_s(self, handle: str) -> float | None:
        job = self._running(handle) or {"metadata": {}}
        made, ended = job["metadata"].get("creationTimestamp"), _ended_at(job)
        return (
            max((ended - datetime.fromisoformat(made)).total_seconds(), 0.0)
            if made and ended
            else None
        )

    def _list_jobs(self) -> dict[str, Object]:
        """And the pods of those that wait for some of them, which say why."""
        jobs_by_name = {
            job["metadata"]["name"]: job for job in self._items(f"{self._kind}s", LABEL)
        }
        self._queued = {}
        if any(map(_is_short_of_pods, jobs_by_name.values())):
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
        """What a job left that we ended."""
        return self._get("configmap", ended_name(handle))

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
        """The job's pods in the order of their index."""
        return sorted(self._items("pods", f"{LABEL}={handle}"), key=_index)

    def _texts(self, handle: str) -> Iterable[str]:
        """Nothing for a pod whose node is gone; what was saved of a job that we ended."""
        pods = self._pods(handle)
        if not pods and (left := self._ended(handle)) is not None:
            yield left.get("data", {}).get(_LOG, "")
        limit = f"--limit-bytes={jobs.MAX_OUTPUT_BYTES}"
        for pod in pods:
            try:
                yield self._kubectl("logs", pod["metadata"]["name"], "--container=run", limit)
            except LauncherError as error:
                if isinstance(error, EngineAwayError) and not _NODE_GONE.search(error.message):
                    raise  # a log that cannot be read now may hold the result

    def _create(self, job: dict[str, Any]) -> dict[str, Any]:
        """The new object, or the existing one if another process created it first or an earlier
        answer was lost.
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
        """All objects of a kind in the namespace that a label selects."""
        items: list[Object] = json.loads(
            self._kubectl("get", kind, f"--selector={selector}", "-o", "json")
        )["items"]
        return items

    def _kubectl(self, *arguments: str, stdin: str = "", negative: str | None = None) -> str:
        """The output of kubectl. `negative`: an answer for which it exits with a failure although
        it succeeded.
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
                f"kubectl {arguments[0]}: no answer within {_COMMAND_LIMIT_S:g} s"
            ) from error
        except OSError as error:
            self._set_away(True)
            raise LauncherError(f"{options.kubectl} cannot be run: {error}") from error
        if done.returncode != 0 and (negative is None or done.stdout.strip() != negative):
            message = " ".join(done.stderr.split())[:500]
            if _PASSING.search(message):
                self._set_away(True)
                raise EngineAwayError(f"kubectl {arguments[0]}: {message}")
            raise LauncherError(f"kubectl {arguments[0]}: {message or done.returncode}")
        self._set_away(False)
        return done.stdout


def job_state(job: Object) -> JobState:
    """The state of a Job or JobSet: by its conditions, else by its running pods; CANCELLED of what
    one of ours left.
    """
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
    """Pods of a Job that are ready; of a JobSet its Jobs all of whose pods are."""
    return int(
        status.get("ready")
        or sum(each.get("ready") or 0 for each in status.get("replicatedJobsStatus") or [])
    )


def _is_short_of_pods(job: Object) -> bool:
    """Whether a job waits for nodes, or some of its pods for an image."""
    parallelism = int(job.get("spec", {}).get("parallelism") or 1)
    return job_state(job).is_open and _ready(job.get("status") or {}) < parallelism


def ending(job: Object, *, pods: Sequence[Object]) -> Ending:
    """How a job ended that left no record itself: evicted, out of time or memory, or never
    started.
    """
    status, failed = job.get("status") or {}, _conditions(job).get("Failed", {})
    if job.get("kind") == "ConfigMap":
        return Ending(reason="cancelled", wall_s=float(_annotations(job).get(WALL_S, 0.0)))
    start, end = status.get("startTime"), _ended_at(job)
    wall_s = (end - datetime.fromisoformat(start)).total_seconds() if start and end else None
    ran_s = ran_for_s(pods, until=end)
    wall_s = (
        wall_s if ran_s is None else ran_s
    )  # the Job's own times count waiting for nodes and images
    if failed.get("reason") == "DeadlineExceeded":
        return Ending(reason="timeout", wall_s=wall_s)
    endings = [each for pod in pods if (each := pod_ending(pod)) is not None]
    if endings:
        return replace(endings[0], wall_s=wall_s)
    if not failed:
        return Ending(
            reason="lost", wall_s=wall_s, error="the job's pods are gone, and so is their output"
        )
    message = ": ".join(filter(None, (failed.get("reason"), failed.get("message"))))[:500]
    return Ending(reason="terminated", wall_s=wall_s, error=f"Kubernetes ended the job: {message}")


def _ended_at(job: Object) -> datetime | None:
    """When a Job ended, by its status."""
    status = job.get("status") or {}
    text = status.get("completionTime") or _conditions(job).get("Failed", {}).get(
        "lastTransitionTime"
    )
    return datetime.fromisoformat(text) if text else None


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
