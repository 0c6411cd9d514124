"""The Kubernetes objects of one job: pure, printable, and ready for a person to apply by hand.

An indexed Job has a pod per node. The pods find the first one by the name that a headless Service gives it; a ConfigMap
holds the job's files. The Job owns both, so they are deleted with it.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

from hp_tool.domain.ports import LaunchPlan
from hp_tool.errors import InputError
from hp_tool.launchers import jobs, streamed
from hp_tool.launchers.options import KubernetesOptions

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


def object_name(job_name: str) -> str:
    """A job's name as Kubernetes accepts it: lower-case letters, digits and dashes, and a digest if the name had to change."""
    plain = re.sub(r"[^a-z0-9]+", "-", jobs.check_name(job_name).lower()).strip("-")
    if plain == job_name and len(plain) <= _LONGEST_NAME and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:10]
    return f"hp-{plain[: _LONGEST_NAME - 14]}".strip("-") + f"-{digest}"


def job(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
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
    files = streamed.job_files(plan)
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
    return {"apiVersion": "v1", "kind": "List", "items": [*belongings(options, plan=plan), job(options, plan=plan)]}


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": options.namespace, "labels": {LABEL: name}}


def _container(options: KubernetesOptions, *, name: str, per_node: int) -> dict[str, Any]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    devices = {"cpu": str(per_node)} if options.gpu == "cpu" else {options.gpu_resource: str(per_node)}
    limits = {**devices, **options.resources}
    return {
        "name": "run",
        "image": options.image,
        "command": [options.python, f"{_FILES}/{streamed.SUPERVISOR}", "--attached", _FILES],
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
