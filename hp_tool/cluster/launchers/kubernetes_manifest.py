"""The objects of a job on Kubernetes, pure: a Job or JobSet with its pods' template, their files,
what a cancel leaves.
"""

import hashlib
import math
import re
from typing import Any

from hp_tool.cluster.launchers import jobs
from hp_tool.cluster.launchers.kubernetes_patch import merged
from hp_tool.cluster.launchers.options import KubernetesOptions
from hp_tool.cluster.launchers.streamed import SUPERVISOR, job_files
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.errors import InputError

LABEL = "hp-tool/job"
NUM_GPUS, TIMEOUT_S = "hp-tool/num-gpus", "hp-tool/timeout-s"
CANCELLED = "hp-tool/cancelled"
"""Label of the ConfigMap that a job which we ended leaves behind."""
_GRACE_S = 600.0
"""Added to the run's time limit: Kubernetes' own limit is a backstop, for an image that cannot be
pulled or a node that hangs. It is set on the pods, whose clock starts on a node, so that waiting
for one does not count.
"""
_FIRST_PORT, _PORTS = 20_000, 10_000
"""A job's port follows from its name: on the nodes' own network two jobs must not have the same."""
_FILES = "/hp-tool"
_LONGEST_NAME = 45
"""A host name has 63 letters; the pod's index, and in a JobSet the Job's name, take some of
them.
"""
_REPLICATED = "node"
"""Name of a JobSet's Job."""
_LARGEST_FILES_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB."""


def object_name(job_name: str) -> str:
    """A job's name as Kubernetes accepts it: lower-case letters, digits and dashes, and a digest if
    the name had to change.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", jobs.check_name(job_name).lower()).strip("-")
    if plain == job_name and len(plain) <= _LONGEST_NAME and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:10]
    return f"hp-{plain[: _LONGEST_NAME - 14]}".strip("-") + f"-{digest}"


def workload_object(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
    """The Job, or the JobSet of it. Its pods are never restarted: the search decides whether a run
    is repeated.
    """
    nodes = options.num_nodes(num_gpus=plan.num_gpus)
    name = object_name(plan.job_name)
    own, jobset = {LABEL: name}, options.workload == "jobset"
    labels, annotations = (
        {key: jobs.filled(text, plan=plan) for key, text in templates.items()}
        for templates in (options.labels, options.annotations)
    )
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
    base = {"metadata": {"labels": {**labels, **own}, "annotations": annotations}, "spec": pod}
    template = merged(base, options.pod_template)
    template["metadata"]["labels"] = {**template["metadata"].get("labels", {}), **own}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "template": template,
    }
    limits = {NUM_GPUS: str(plan.num_gpus), TIMEOUT_S: f"{plan.timeout_s:g}"}
    metadata = {
        "name": name,
        "namespace": options.namespace,
        "labels": {**labels, **own},
        "annotations": {**annotations, **limits},
    }
    keep = {"ttlSecondsAfterFinished": options.keep_s}
    if not jobset:
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {**spec, **keep},
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            **keep,
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": False},  # the Service is ours
            "replicatedJobs": [{"name": _REPLICATED, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def ended_name(handle: str) -> str:
    """The ConfigMap that takes a cancelled job's name."""
    return f"{handle}-ended"


def ended_object(options: KubernetesOptions, *, handle: str) -> dict[str, Any]:
    """What a cancelled job leaves: nothing may start under its name any more."""
    metadata = {
        "name": ended_name(handle),
        "namespace": options.namespace,
        "labels": {CANCELLED: handle},
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}


def belongings(
    options: KubernetesOptions, *, plan: LaunchPlan, job_uid: str | None = None
) -> list[dict[str, Any]]:
    """The objects that the Job's pods need to start: its files and its hosts' names. With the Job's
    uid, it owns them.
    """
    name = object_name(plan.job_name)
    files = job_files(plan)
    size = sum(len(text.encode()) for text in files.values())
    if size > _LARGEST_FILES_BYTES:
        raise InputError(
            f"the job's files have {size:,} bytes; Kubernetes accepts {_LARGEST_FILES_BYTES:,}",
            field="trainer.command",
        )
    workload = (
        ("batch/v1", "Job") if options.workload == "job" else ("jobset.x-k8s.io/v1alpha2", "JobSet")
    )
    owner = {"apiVersion": workload[0], "kind": workload[1], "name": name, "uid": job_uid}
    metadata = _metadata(options, name) | ({} if job_uid is None else {"ownerReferences": [owner]})
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {LABEL: name},
            },
        },
    ]


def manifest(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
    """All objects, as `kubectl apply -f -` accepts them."""
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [*belongings(options, plan=plan), workload_object(options, plan=plan)],
    }


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": options.namespace, "labels": {LABEL: name}}


def _container(options: KubernetesOptions, *, name: str, per_node: int) -> dict[str, Any]:
    index = {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    devices = (
        {"cpu": str(per_node)} if options.gpu == "cpu" else {options.gpu_resource: str(per_node)}
    )
    limits = {**devices, **options.resources}
    port = _FIRST_PORT + int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % _PORTS
    # A JobSet names its Job, and with it the pods.
    first = f"{name}-0" if options.workload == "job" else f"{name}-{_REPLICATED}-0-0"
    return {
        "name": "run",
        "image": options.image,
        "command": [options.python, f"{_FILES}/{SUPERVISOR}", "--attached", _FILES],
        "env": [
            {"name": "PET_MASTER_ADDR", "value": f"{first}.{name}"},
            {"name": "PET_MASTER_PORT", "value": str(port)},
            {"name": "PET_NODE_RANK", "valueFrom": index},
        ],
        "ports": [{"name": "rendezvous", "containerPort": port}],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [
            {"name": "hp-tool", "mountPath": _FILES, "readOnly": True},
            {"name": "hp-shm", "mountPath": "/dev/shm"},  # noqa: S108 - the container's own
            *options.volume_mounts,
        ],
    }
