"""Jobs on a Kubernetes cluster through kubectl: no shared folder, no state of our own.

A job is an indexed Job with a pod per node, which find the first one by the name that a headless Service gives it; a ConfigMap
holds the job's files. The supervisor runs a job's part in each pod and prints its results, which are read from the pods' logs.
"""

import contextlib
import hashlib
import json
import math
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hp_tool.domain.ports import JobState, LaunchPlan, Waiting
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError, LauncherError
from hp_tool.launchers import jobs, torchrun
from hp_tool.launchers.jobs import Ending
from hp_tool.launchers.kubernetes_pods import Object, never_starts, pod_ending, ran_for_s, why_waiting
from hp_tool.launchers.options import KubernetesOptions
from hp_tool.launchers.streamed import SUPERVISOR, StreamedLauncher, job_files

_COMMAND_LIMIT_S = 20.0
"""Shorter than a coordinator's lease."""
LABEL = "hp-tool/job"
NUM_GPUS, TIMEOUT_S = "hp-tool/num-gpus", "hp-tool/timeout-s"
CANCELLED = "hp-tool/cancelled"
"""Annotation of a job that we ended."""
WALL_S = "hp-tool/wall-s"
"""How long such a job had run: Kubernetes forgets when a suspended one started."""
_GRACE_S = 600.0
"""Added to the run's time limit: Kubernetes' own limit is a backstop, for an image that cannot be pulled or a node that hangs.
It is set on the pods, whose clock starts on a node, so that waiting for one does not count."""
_PORT = 29_400
_FILES = "/hp-tool"
_LONGEST_NAME = 52
"""A host name has 63 letters, and the pod's index takes some of them."""
_LARGEST_FILES_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB."""


class KubernetesLauncher(StreamedLauncher):
    """The Launcher port on a Kubernetes cluster. A handle is the name of the Job object."""

    name = "kubernetes"

    def __init__(self, *, options: KubernetesOptions | Mapping[str, object] | None = None) -> None:
        """options: the cluster (default: the file that HP_KUBERNETES_CONFIG names)."""
        self._options = KubernetesOptions.of(options)
        self._queued: dict[str, list[Object]] = {}
        """Pods of the jobs, when one of these was last seen to wait."""
        super().__init__(self._options)

    def answers(self) -> str:
        namespace = self._options.namespace
        for kind in ("jobs.batch", "configmaps", "services"):
            if self._kubectl("auth", "can-i", "create", kind, negative="no").strip() != "yes":
                raise LauncherError(f"this user may not create {kind} in the namespace {namespace}")
        job = job_object(self._options, plan=torchrun.smallest_plan(self._options, job_name="hp-doctor"))
        self._kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(job))
        return f"Kubernetes answers: Jobs may be created in the namespace {namespace}"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        plan = torchrun.cluster_plan(request, job_name=job_name, options=self._options)
        if "PYTHONPATH" in self._options.environment:
            return plan
        # This host's checkout does not exist in the image, which has its own hp_tool.
        return replace(plan, environment={name: value for name, value in plan.environment.items() if name != "PYTHONPATH"})

    def describe(self, plan: LaunchPlan) -> str:
        return json.dumps(manifest(self._options, plan=plan), indent=2)

    def submit(self, plan: LaunchPlan) -> str:
        """The Job comes first: what belongs to it carries its uid, and its pods wait for that."""
        handle = object_name(plan.job_name)
        belongings(self._options, plan=plan)  # refuses files that are too large before anything is created
        job = self._job(handle) or self._create(job_object(self._options, plan=plan))
        if job_state(job).is_open:
            for each in belongings(self._options, plan=plan, job_uid=job["metadata"]["uid"]):
                self._kubectl("apply", "-f", "-", stdin=json.dumps(each))
        return handle

    def cancel(self, job_name: str) -> None:
        """Suspend the Job, which ends its pods and keeps their log as far as it was read. Without a Job, create one that takes
        the name."""
        handle = object_name(job_name)
        job = self._job(handle) or self._create(cancelled_job(self._options, job_name=job_name))
        if job_state(job).is_open:
            ran_s = ran_for_s(self._pods(handle), until=datetime.now(UTC))
            annotations = {CANCELLED: "true", WALL_S: f"{_running_s(job) if ran_s is None else ran_s:g}"}
            patch = {"metadata": {"annotations": annotations}, "spec": {"suspend": True}}
            self._kubectl("patch", "job", handle, "--type=merge", "--patch", json.dumps(patch))

    def open_jobs(self) -> list[str]:
        """Names of Job objects; those of searches are their job names."""
        return [name for name, job in self._list_jobs().items() if job_state(job).is_open]

    def _handle(self, job_name: str) -> str:
        return object_name(job_name)

    def waiting(self, handle: str) -> Waiting | None:
        reasons = [reason for pod in self._queued.get(handle, ()) if (reason := why_waiting(pod)) is not None]
        return Waiting(reason=reasons[0]) if reasons else None

    def _list_jobs(self) -> dict[str, Object]:
        """And the pods of those that wait, which say why."""
        found = {job["metadata"]["name"]: job for job in self._items("jobs", LABEL)}
        self._queued = {}
        if any(job_state(job) is JobState.QUEUED for job in found.values()):
            with contextlib.suppress(LauncherError):
                for pod in self._items("pods", LABEL):
                    self._queued.setdefault(pod["metadata"].get("labels", {}).get(LABEL, ""), []).append(pod)
        return found

    def _job(self, handle: str) -> dict[str, Any] | None:
        answer = self._kubectl("get", "job", handle, "--ignore-not-found", "-o", "json")
        job: dict[str, Any] | None = json.loads(answer) if answer.strip() else None
        return job

    def _state(self, job: Object) -> JobState:
        state = job_state(job)
        if state is JobState.QUEUED and any(map(never_starts, self._queued.get(job["metadata"]["name"], ()))):
            return JobState.FINISHED
        return state

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
    ran_s = ran_for_s(pods, until=datetime.fromisoformat(end) if end else None)
    wall_s = wall_s if ran_s is None else ran_s  # the Job's own times count waiting for nodes and images
    if failed.get("reason") == "DeadlineExceeded":
        return Ending(reason="timeout", wall_s=wall_s)
    endings = [each for pod in pods if (each := pod_ending(pod)) is not None]
    if endings:
        return replace(endings[0], wall_s=wall_s)
    if not failed:
        return Ending(reason="lost", wall_s=wall_s, error="the job's pods are gone, and so is their output")
    message = ": ".join(filter(None, (failed.get("reason"), failed.get("message"))))[:500]
    return Ending(reason="terminated", wall_s=wall_s, error=f"Kubernetes ended the job: {message}")


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


def object_name(job_name: str) -> str:
    """A job's name as Kubernetes accepts it: lower-case letters, digits and dashes, and a digest if the name had to change."""
    plain = re.sub(r"[^a-z0-9]+", "-", jobs.check_name(job_name).lower()).strip("-")
    if plain == job_name and len(plain) <= _LONGEST_NAME and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:10]
    return f"hp-{plain[: _LONGEST_NAME - 14]}".strip("-") + f"-{digest}"


def job_object(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
    """The Job. Its pods are never restarted: the search decides whether a run is repeated."""
    nodes = options.num_nodes(num_gpus=plan.num_gpus)
    name = object_name(plan.job_name)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": name,
        "activeDeadlineSeconds": math.ceil(plan.timeout_s + _GRACE_S),
        "terminationGracePeriodSeconds": 30,
        "containers": [_container(options, name=name, per_node=plan.num_gpus // nodes)],
        "volumes": [
            {"name": "hp-tool", "configMap": {"name": name}},
            {"name": "hp-shm", "emptyDir": {"medium": "Memory"}},
            *options.volumes,
        ],
    }
    optional = {
        "nodeSelector": options.node_selector,
        "tolerations": list(options.tolerations),
        "serviceAccountName": options.service_account,
        "hostNetwork": options.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if options.host_network else None,
    }
    pod |= {key: value for key, value in optional.items() if value}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **_metadata(options, name),
            "annotations": {NUM_GPUS: str(plan.num_gpus), TIMEOUT_S: f"{plan.timeout_s:g}"},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": options.keep_s,
            "template": {"metadata": {"labels": {LABEL: name}}, "spec": pod},
        },
    }


def cancelled_job(options: KubernetesOptions, *, job_name: str) -> dict[str, Any]:
    """A Job without pods, which takes the name so that no other Job can be created under it."""
    name = object_name(job_name)
    pod = {"restartPolicy": "Never", "containers": [{"name": "run", "image": options.image}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**_metadata(options, name), "annotations": {CANCELLED: "true"}},
        "spec": {"suspend": True, "template": {"metadata": {"labels": {LABEL: name}}, "spec": pod}},
    }


def belongings(options: KubernetesOptions, *, plan: LaunchPlan, job_uid: str | None = None) -> list[dict[str, Any]]:
    """The objects that the Job's pods need to start: its files and its hosts' names. With the Job's uid, it owns them."""
    name = object_name(plan.job_name)
    files = job_files(plan)
    size = sum(len(text.encode()) for text in files.values())
    if size > _LARGEST_FILES_BYTES:
        raise InputError(
            f"the job's files have {size:,} bytes; Kubernetes accepts {_LARGEST_FILES_BYTES:,}", field="trainer.command"
        )
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
    metadata = _metadata(options, name) | ({} if job_uid is None else {"ownerReferences": [owner]})
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: name}},
        },
    ]


def manifest(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
    """All objects, as `kubectl apply -f -` accepts them."""
    return {"apiVersion": "v1", "kind": "List", "items": [*belongings(options, plan=plan), job_object(options, plan=plan)]}


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": options.namespace, "labels": {LABEL: name}}


def _container(options: KubernetesOptions, *, name: str, per_node: int) -> dict[str, Any]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    devices = {"cpu": str(per_node)} if options.gpu == "cpu" else {options.gpu_resource: str(per_node)}
    limits = {**devices, **options.resources}
    return {
        "name": "run",
        "image": options.image,
        "command": [options.python, f"{_FILES}/{SUPERVISOR}", "--attached", _FILES],
        "env": [
            {"name": "PET_MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": str(_PORT)},
            {"name": "PET_NODE_RANK", "valueFrom": index},
        ],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [
            {"name": "hp-tool", "mountPath": _FILES, "readOnly": True},
            {"name": "hp-shm", "mountPath": "/dev/shm"},  # noqa: S108 - the container's own
            *options.volume_mounts,
        ],
    }
